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
    name: str, release: str, connector: Connector, installed: Installation, command: str
) -> CellRecord:
    """Measure one cell; its `error` is the log's end if the engine fails."""
    began_s = time.monotonic()
    means: Passes = {}
    hashes: dict[str, str] = {}
    error = not_in_release(connector, installed)
    if error is None:
        with tempfile.TemporaryDirectory(prefix="kvtax-cell-") as folder:
            try:
                means, hashes = run(connector, installed, Path(folder) / "cell")
            except (RuntimeError, ServerError) as failure:
                error = str(failure)
    return CellRecord(
        release=release,
        connector=name,
        provenance=provenance.collect(hashes, command, installed),
        wall_s=round(time.monotonic() - began_s, 1),
        levels={axis: list(told.levels) for axis, told in AXES.items()},
        means_us=means,
        error=error,
    )


def measured(
    name: str, release: str, connector: Connector, installed: Installation, command: str
) -> CellRecord:
    """Measure one cell; its `error` is the reason alone, without the engine's log."""
    found = measure(name, release, connector, installed, command)
    if found.error:
        found = msgspec.structs.replace(found, error=reason(found.error))
    return found


def run(
    connector: Connector, installed: Installation, folder: Path
) -> tuple[Passes, dict[str, str]]:
    """Return the means, and the hashes of the patches.

    Raises ServerError with the end of the engine's log if it does not start, or dies,
    and ServerError if the connector's companion does not start.
    """
    folder.mkdir()
    with ExitStack() as stack:
        told = stack.enter_context(accompanied(connector, folder, installed))
        transfer = told.kv_transfer_config
        given = {
            "kv_transfer": transfer and CPU_ENGINE.kv_transfer_config | transfer,
            "sizes": SIZES | told.engine_args,
        }
        engine = stack.enter_context(
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
        engine.wait_ready()
        axes = [axis for axis in AXES if axis != "tier" or engine.ask("has_tier")]
        ranges = []
        began_s = time.monotonic()
        for number in range(PASSES):
            if number >= FEWEST_PASSES and time.monotonic() - began_s > LIMIT_S:
                break
            for axis in axes:
                levels = engine.ask("ranges", axis, _in_order(axis, number), STEPS)
                ranges.append((axis, _down(axis, number), levels))
    steps = _read(folder / "records")
    found: Passes = {axis: {} for axis in axes}
    for axis, down, of_levels in ranges:
        upwards = of_levels[::-1] if down else of_levels
        for one, means in _means(steps, upwards).items():
            found[axis].setdefault(one, []).append(means)
    return found, engine.patch_hashes


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


def _means(
    steps: pl.DataFrame, ranges: list[tuple[int, int]]
) -> dict[str, list[float]]:
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
