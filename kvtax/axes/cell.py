# SPDX-License-Identifier: Apache-2.0
"""One connector on one release: what its calls take at each level of each axis.

The engine core runs in one process, with the release's own scheduler, block pool,
worker and connector, and the null model. HTTP has no part in the question.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import msgspec
import polars as pl

from kvtax.axes import GIVEN
from kvtax.engine import ServerError, provenance
from kvtax.engine.companion import accompanied
from kvtax.engine.connector import Connector
from kvtax.engine.engine_process import ENDED, EngineProcess
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.releases import beside
from kvtax.records.observatory_cell import CellRecord, Passes
from kvtax.records.steps import only_life
from kvtax.steps.life import whole_steps
from kvtax.steps.parts import method_columns, step_parts
from kvtax.verdict.axes import AXES

# Every second pass goes down the levels, so that a drift of the machine falls out.
PASSES, FEWEST_PASSES = 9, 6
# After so long, the fewest will do: some connectors write every block that is computed.
LIMIT_S = 30.0
STEPS = 25
# Filled, and emptied before the next pass.
ONLY_UP = ("cache", "tier")
# What a busy machine does to single steps is left out. So is what a connector does in
# less than one step of ten: that is for the sweep to see.
SLOWEST = 0.1
# 4 requests of 131,072 tokens, and some more to fill the cache with.
SIZES = {"num_blocks": 36_000, "max_model_len": 132_096, "max_requests": 256}
RUNS_HERE = ("cpu_uniproc", "cpu_small_blocks")
# What the scheduler takes: of a cell without a connector, that is the figure.
SCHEDULER_US = pl.col("schedule_us") + pl.col("update_us")
PER_STEP = ("scheduler_us", "step_us", "connector_us")
Ranges = list[tuple[int, int]]

# What comes before a line of a traceback in vLLM's logs.
PREFIX = re.compile(r"^(\[rank\d+\]: |\(\w+ pid=\d+\) )")
RAISED = re.compile(
    r"(?:[\w.]*\.)?(\w*(?:Error|Exception)(?:: .+)?|Fatal Python error: .+)"
)
# An exception of any name stands below a line of code, or below the marks in it.
BELOW_CODE = re.compile(r"(?:[\w.]*\.)?([A-Z]\w*(?:: .+)?)")
# Raised while what had failed was taken down.
IGNORED = "Exception ignored in"
FRAME = re.compile(r'\s*File ".*/(vllm/[^"]+)", line (\d+), in ')


def measure(
    name: str,
    release: str,
    connector: Connector,
    installed: Installation,
    command: str,
    noop: Connector | None = None,
) -> CellRecord:
    """Measure one cell; its `error` is the log's end if the engine fails.

    An engine with the connector `noop` takes turns with it, if it is given.
    """
    began_s = time.monotonic()
    means: list[Passes] = [{}, {}]
    hashes: dict[str, str] = {}
    error = not_in_release(connector, installed)
    if error is None:
        both = [connector, *([noop] if noop else [])]
        with tempfile.TemporaryDirectory(prefix="kvtax-cell-") as folder:
            try:
                means, hashes = run(both, installed, Path(folder))
            except (RuntimeError, ServerError) as failure:
                error = str(failure)
    return CellRecord(
        release=release,
        connector=name,
        provenance=provenance.collect(hashes, command, installed),
        wall_s=round(time.monotonic() - began_s, 1),
        levels={axis: list(told.levels) for axis, told in AXES.items()},
        means_us=means[0],
        noop_us=_whole_steps(means[1]) if noop else {},
        error=error,
    )


def measured(
    name: str,
    release: str,
    connector: Connector,
    installed: Installation,
    command: str,
    noop: Connector,
) -> CellRecord:
    """Measure one cell beside `noop`; its `error` is the reason, without the log."""
    found = measure(name, release, connector, installed, command, noop)
    if found.error:
        found = msgspec.structs.replace(found, error=reason(found.error))
    return found


def run(
    connectors: Sequence[Connector], installed: Installation, folder: Path
) -> tuple[list[Passes], dict[str, str]]:
    """Hold the engines of `connectors` at each level of each axis, in turn.

    Returns the means of each, and the hashes of the first one's patches. Raises
    ServerError with the end of an engine's log if it does not start, or dies, and
    ServerError if a connector's companion does not start.
    """
    with ExitStack() as stack:
        engines = [
            _started(stack, connector, folder / str(number), installed)
            for number, connector in enumerate(connectors)
        ]
        for engine in engines:
            engine.wait_ready()
        axes = [_axes_of(engine) for engine in engines]
        ranges: list[list[tuple[str, bool, Ranges]]] = [[] for _ in engines]
        began_s = time.monotonic()
        for number in range(PASSES):
            if number >= FEWEST_PASSES and time.monotonic() - began_s > LIMIT_S:
                break
            for axis in axes[0]:
                order = list(enumerate(engines))
                for which, engine in order[::-1] if number % 2 else order:
                    if axis in axes[which]:
                        down, levels = _down(axis, number), _in_order(axis, number)
                        held = engine.ask("ranges", axis, levels, STEPS)
                        ranges[which].append((axis, down, held))
    means = [
        _passes(_read(folder / str(number) / "records"), of_engine)
        for number, of_engine in enumerate(ranges)
    ]
    return means, engines[0].patch_hashes


def _started(
    stack: ExitStack, connector: Connector, folder: Path, installed: Installation
) -> EngineProcess:
    """Start an engine with the connector, which lives as long as `stack`."""
    folder.mkdir()
    told = stack.enter_context(accompanied(connector, folder, installed))
    transfer = told.kv_transfer_config
    given = {
        "kv_transfer": transfer and CPU_ENGINE.kv_transfer_config | transfer,
        "sizes": SIZES | told.engine_args,
    }
    return stack.enter_context(
        EngineProcess(
            folder,
            "kvtax.axes.worker",
            [*connector.patches, *RUNS_HERE],
            recording=True,
            env=told.env | {GIVEN: json.dumps(given)},
            installed=installed,
            max_model_len=SIZES["max_model_len"],
            beside=beside(told.beside, installed),
            secrets=provenance.secrets_in(given, told.env),
        )
    )


def _axes_of(engine: EngineProcess) -> list[str]:
    return [axis for axis in AXES if axis != "tier" or engine.ask("has_tier")]


def _passes(steps: pl.DataFrame, ranges: Sequence[tuple[str, bool, Ranges]]) -> Passes:
    found: Passes = {axis: {} for axis, _, _ in ranges}
    for axis, down, of_levels in ranges:
        upwards = of_levels[::-1] if down else of_levels
        for one, means in _means(steps, upwards).items():
            found[axis].setdefault(one, []).append(means)
    return found


def _whole_steps(means: Passes) -> Passes:
    """Leave out the times of single methods."""
    return {axis: {one: of[one] for one in PER_STEP} for axis, of in means.items()}


def _down(axis: str, number: int) -> bool:
    return axis not in ONLY_UP and number % 2 == 1


def _in_order(axis: str, number: int) -> list[int]:
    levels = list(AXES[axis].levels)
    return levels[::-1] if _down(axis, number) else levels


def _read(records: Path) -> pl.DataFrame:
    steps = whole_steps(only_life(records)).table
    connector = step_parts(method_columns(steps))["connector_us"]
    return steps.filter(pl.col("step_us").is_not_null()).with_columns(
        SCHEDULER_US.alias("scheduler_us"), connector
    )


def _means(steps: pl.DataFrame, ranges: Ranges) -> dict[str, list[float]]:
    """Compute by name of the time its mean in each of `ranges` of step_id."""
    times = [*PER_STEP, *method_columns(steps)]
    found: dict[str, list[float]] = {one: [] for one in times}
    for first, end in ranges:
        own = steps.filter(pl.col("step_id").is_between(first, end, closed="left"))
        if own.height != end - first:
            raise RuntimeError(f"{own.height} records of {end - first} steps")
        kept = round(own.height * (1 - SLOWEST))
        for one in times:
            fastest = own[one].fill_null(0.0).sort().head(kept)
            # A column of floats, so its mean is one too.
            mean = cast(float, fastest.mean())
            found[one].append(round(float(mean), 3))
    return found


def not_in_release(connector: Connector, installed: Installation) -> str | None:
    """Return the error of a release without this connector; None if it has it.

    Raises InstallationError if vLLM cannot be imported.
    """
    told = connector.kv_transfer_config or {}
    module = told.get("kv_connector_module_path")
    if (name := told.get("kv_connector")) is None:
        return None
    if module is None:
        known = name in installed.vllm().connectors
    else:
        # Somebody's own is none of a release's.
        file = installed.package("vllm").parent / f"{module.replace('.', '/')}.py"
        known = not module.startswith("vllm.") or file.exists()
    return None if known else f"there is no {name} in this release"


def reason(error: str) -> str:
    """Find the exception at the end of a log, and the line of vLLM that raised it.

    Without one, return how the engine ended, and the last line.
    """
    lines = [PREFIX.sub("", line) for line in error.strip().splitlines()]
    ignored = (n for n, line in enumerate(lines) if line.startswith(IGNORED))
    raised = [
        (number, found[1])
        for number, line in enumerate(lines[: next(ignored, None)])
        if (found := RAISED.fullmatch(line))
        or (lines[number - 1][:2] == "  " and (found := BELOW_CODE.fullmatch(line)))
    ]
    if not raised:
        ended = f"{lines[0]}: " if ENDED in lines[0] else ""
        return ended + lines[-1].strip()
    last, told = raised[-1]
    if ":" not in told:
        # An assert without a message; above it are its line and marks below that.
        told += f": {_source(lines[:last])}"
    if "validation error" in told:
        # Pydantic says what is wrong on a line of its own.
        told = lines[last + 1].strip().partition(" [type=")[0]
    frames = [found for line in lines[:last] if (found := FRAME.match(line))]
    return f"{told} ({frames[-1][1]}:{frames[-1][2]})" if frames else told


def _source(above: list[str]) -> str:
    """Find the line of code that a traceback ends with."""
    texts = (line.strip() for line in reversed(above))
    return next((text for text in texts if text.strip("^~ ")), "")
