# SPDX-License-Identifier: Apache-2.0
"""One connector on one release: what its calls take at each level of each axis.

The engine core runs in one process, with the release's own scheduler, block pool,
worker and connector, and the null model. HTTP has no part in the question.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import polars as pl

from kvtax.axes import GIVEN, Held
from kvtax.engine import ServerError, provenance
from kvtax.engine.companion import accompanied
from kvtax.engine.connector import Connector
from kvtax.engine.engine_process import ENDED, EngineProcess
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.releases import beside
from kvtax.records.files import read_header
from kvtax.records.observatory_cell import AxisHolds, CellRecord, Idle, Passes
from kvtax.records.steps import EngineHeader, WorkerHeader, only_life
from kvtax.steps.life import whole_steps
from kvtax.steps.parts import method_columns, step_parts
from kvtax.verdict.axes import AXES, SLOW_US

PASSES, FEWEST_PASSES = 9, 6
# After so long the fewest will do: some connectors write every block that is computed.
LIMIT_S = 30.0
# After so long the connector is too slow; LMCacheMP's fewest passes take 4 minutes.
MOST_S = 600.0
MOST_WRITTEN_BYTES = 4 * 2**30
STEPS = 25
# More where a cost in one step of 200 is counted.
STEPS_OF = {"cache": 150}
# Its pool is made once for all levels.
AT_ONCE = ("prompt",)
# What a busy machine does to single steps is left out of the means. What a connector
# does in less than one step of ten is counted.
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
TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'\s*File "([^"]+)", line (\d+), in ')
# Frames that report no fault of a connector: ours, Python's own, and libraries that
# connectors call.
OURS = re.compile(r"/(kvtax|kvtax_probe|kvtax_null_model)/")
PYTHONS = re.compile(r"<frozen|/lib/python3\.\d+/(?!(site|dist)-packages/)")
LIBRARY = re.compile(
    r"/(site|dist)-packages/(torch|pydantic|pydantic_core|numpy|msgspec|ray|zmq)/"
)
OF_VLLM = re.compile(r".*/(vllm/.+)")


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
    own, of_noop = Measured(), Measured()
    error = not_in_release(connector, installed)
    if error is None:
        both = [(config, installed) for config in (connector, noop) if config]
        with tempfile.TemporaryDirectory(prefix="kvtax-cell-") as folder:
            try:
                own, *others = run(both, Path(folder))
                of_noop = others[0] if others else of_noop
            except (RuntimeError, ServerError) as failure:
                error = str(failure)
    facts = provenance.collect(own.patch_hashes, command, installed)
    wall_s = time.monotonic() - began_s
    return _record(release, name, facts, wall_s, own, of_noop, error)


def _record(
    release: str,
    name: str,
    facts: dict[str, Any],
    wall_s: float,
    own: Measured,
    of_noop: Measured,
    error: str | None = None,
) -> CellRecord:
    return CellRecord(
        release=release,
        connector=name,
        provenance=facts,
        wall_s=round(wall_s, 1),
        levels={name: list(axis.levels) for name, axis in AXES.items()},
        means_us=own.means_us,
        noop_us=_whole_steps(of_noop.means_us),
        holds=own.holds,
        idle=own.idle,
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
    cell = measure(name, release, connector, installed, command, noop)
    if cell.error:
        cell = msgspec.structs.replace(cell, error=reason(cell.error))
    return cell


@dataclass
class Measured:
    """Means and holds of each axis, what is idle, and the hashes of the patches."""

    means_us: Passes = field(default_factory=dict)
    idle: Idle | None = None
    holds: dict[str, AxisHolds] = field(default_factory=dict)
    patch_hashes: dict[str, str] = field(default_factory=dict)


def run(
    started: Sequence[tuple[Connector, Installation]],
    folder: Path,
    chosen: Collection[str] = AXES,
    limit_s: float = LIMIT_S,
) -> list[Measured]:
    """Hold engines at each level of each of the `chosen` axes, in turn.

    Each has a connector on an installation. After `limit_s` the fewest passes will do.

    Raises ServerError with the end of an engine's log if it does not start, or dies,
    and ServerError if a connector's companion does not start.
    """
    folders = [folder / str(number) for number in range(len(started))]
    with ExitStack() as stack:
        engines = [
            _started(stack, connector, installed, own)
            for (connector, installed), own in zip(started, folders, strict=True)
        ]
        for engine in engines:
            engine.wait_ready()
        axes = [
            [axis for axis in _axes_of(engine) if axis in chosen] for engine in engines
        ]
        passes: list[dict[str, list[list[Held]]]] = [
            {axis: [] for axis in of_engine} for of_engine in axes
        ]
        began_s = time.monotonic()
        for number in range(PASSES):
            if number >= FEWEST_PASSES and time.monotonic() - began_s > limit_s:
                break
            for axis in AXES:
                having = [which for which, own in enumerate(axes) if axis in own]
                order = having[::-1] if number % 2 else having
                held = _pass([engines[which] for which in order], axis, number)
                for which, levels in zip(order, held, strict=True):
                    passes[which][axis].append(levels)
        idle = [Idle(*engine.ask("idle")) for engine in engines]
    return [
        _measured(_read(own / "records"), of_engine, of_idle, engine.patch_hashes)
        for own, of_engine, of_idle, engine in zip(
            folders, passes, idle, engines, strict=True
        )
    ]


def _axes_of(engine: EngineProcess) -> list[str]:
    return [axis for axis in AXES if axis != "tier" or engine.ask("has_tier")]


def _measured(
    steps: pl.DataFrame,
    passes: dict[str, list[list[Held]]],
    idle: Idle,
    patch_hashes: dict[str, str],
) -> Measured:
    measured = Measured(idle=idle, patch_hashes=patch_hashes)
    for axis, of_axis in passes.items():
        measured.means_us[axis], measured.holds[axis] = _of_axis(steps, of_axis)
    return measured


def _whole_steps(means: Passes) -> Passes:
    """Leave out the times of single methods."""
    return {
        axis: {time: times[time] for time in PER_STEP} for axis, times in means.items()
    }


def _started(
    stack: ExitStack, connector: Connector, installed: Installation, folder: Path
) -> EngineProcess:
    """Start the connector's companion and its engine; both end with `stack`."""
    folder.mkdir()
    config = stack.enter_context(accompanied(connector, folder, installed))
    transfer = config.kv_transfer_config
    given: dict[str, Any] = {
        "kv_transfer": transfer and CPU_ENGINE.kv_transfer_config | transfer,
        "sizes": SIZES | config.engine_args,
        "most_bytes": min(MOST_WRITTEN_BYTES, shutil.disk_usage(folder).free // 2),
        "most_s": MOST_S,
    }
    return stack.enter_context(
        EngineProcess(
            folder,
            "kvtax.axes.worker",
            [*connector.patches, *RUNS_HERE],
            recording=True,
            env=config.env | {GIVEN: json.dumps(given)},
            installed=installed,
            max_model_len=SIZES["max_model_len"],
            beside=beside(config.beside, installed),
            secrets=provenance.secrets_in(given, config.env),
        )
    )


def _pass(engines: Sequence[EngineProcess], axis: str, number: int) -> list[list[Held]]:
    """Hold each level of `axis`, in a random order; return the holds by level.

    A random order separates the level from a drift of the machine and from the time
    since a reset. The engines take turns at each level, since the speed of a shared
    machine changes within seconds.
    """
    levels = list(AXES[axis].levels)
    order = random.Random(f"{axis} {number}").sample(levels, len(levels))
    steps = STEPS_OF.get(axis, STEPS)
    held_at: list[dict[int, Held]] = [{} for _ in engines]
    for some in [order] if axis in AT_ONCE else [[level] for level in order]:
        for engine, of_engine in zip(engines, held_at, strict=True):
            held = engine.ask("hold", axis, some, steps, timeout_s=MOST_S)
            of_engine.update(zip(some, held, strict=True))
    return [[of_engine[level] for level in levels] for of_engine in held_at]


def _read(records: Path) -> pl.DataFrame:
    """Read the steps; methods that only return a constant take no time in any."""
    life = only_life(records)
    headers: dict[str, EngineHeader | WorkerHeader] = {
        "scheduler": read_header(life / "engine_step.jsonl", EngineHeader),
        "worker": read_header(life / "worker_step.r0.jsonl", WorkerHeader),
    }
    constant = {
        f"{side}.{method}_us": pl.lit(0.0)
        for side, header in headers.items()
        for method in header.constant
    }
    steps = whole_steps(life).table.with_columns(**constant)
    connector = step_parts(method_columns(steps))["connector_us"]
    return steps.filter(pl.col("step_us").is_not_null()).with_columns(
        SCHEDULER_US.alias("scheduler_us"), connector
    )


def _of_axis(
    steps: pl.DataFrame, passes: Sequence[Sequence[Held]]
) -> tuple[dict[str, list[list[float]]], AxisHolds]:
    """Compute the means of all times, and what is recorded of the holds."""
    times = [*PER_STEP, *method_columns(steps)]
    means: dict[str, list[list[float]]] = {
        time: [] for time in [*times, "threads_us", "processes_us"]
    }
    holds = AxisHolds(steps=passes[0][0].end - passes[0][0].first)
    for held in passes:
        own = [_steps_of(steps, hold) for hold in held]
        for column in times:
            means[column].append([_usual(table[column]) for table in own])
        means["threads_us"].append([round(hold.threads_us, 3) for hold in held])
        means["processes_us"].append([round(hold.processes_us, 3) for hold in held])
        holds.slow.append([_slow(table["connector_us"]) for table in own])
        holds.time_s.append([round(hold.time_s, 3) for hold in held])
        holds.age_s.append([round(hold.age_s, 3) for hold in held])
    return means, holds


def _steps_of(steps: pl.DataFrame, hold: Held) -> pl.DataFrame:
    own = steps.filter(
        pl.col("step_id").is_between(hold.first, hold.end, closed="left")
    )
    if own.height != hold.end - hold.first:
        raise RuntimeError(f"{own.height} records of {hold.end - hold.first} steps")
    return own


def _usual(us: pl.Series) -> float:
    """Compute the mean without the slowest steps."""
    kept = round(us.len() * (1 - SLOWEST))
    # A column of floats, so its mean is one too.
    return round(float(cast(float, us.fill_null(0.0).sort().head(kept).mean())), 3)


def _slow(us: pl.Series) -> int:
    """Count the steps that take SLOW_US more than half of the steps of the hold do."""
    us = us.fill_null(0.0)
    return int((us > cast(float, us.median()) + SLOW_US).sum())


def not_in_release(connector: Connector, installed: Installation) -> str | None:
    """Return the error of a release without this connector; None if it has it.

    Raises InstallationError if vLLM cannot be imported.
    """
    transfer = connector.kv_transfer_config or {}
    module = transfer.get("kv_connector_module_path")
    if (name := transfer.get("kv_connector")) is None:
        return None
    if module is None:
        known = name in installed.vllm().connectors
    else:
        # Somebody's own is none of a release's.
        file = installed.package("vllm").parent / f"{module.replace('.', '/')}.py"
        known = not module.startswith("vllm.") or file.exists()
    return None if known else f"there is no {name} in this release"


def reason(error: str) -> str:
    """Find the exception at the end of a log, and the line that raised it.

    Without an exception, return how the engine ended, and the last line.
    """
    lines = [PREFIX.sub("", line) for line in error.strip().splitlines()]
    ignored = (n for n, line in enumerate(lines) if line.startswith(IGNORED))
    raised = [
        (number, match[1])
        for number, line in enumerate(lines[: next(ignored, None)])
        if (match := RAISED.fullmatch(line))
        or (lines[number - 1][:2] == "  " and (match := BELOW_CODE.fullmatch(line)))
    ]
    if not raised:
        ended = f"{lines[0]}: " if ENDED in lines[0] else ""
        return ended + lines[-1].strip()
    last, message = raised[-1]
    if ":" not in message:
        # An assert without a message; above it are its line and marks below that.
        message += f": {_source(lines[:last])}"
    if "validation error" in message:
        # Pydantic says what is wrong on a line of its own.
        message = lines[last + 1].strip().partition(" [type=")[0]
    place = _place(lines[:last])
    return f"{message} ({place})" if place else message


def _place(above: list[str]) -> str | None:
    """Return `file:line` of the innermost frame of a connector, else of vLLM.

    `above` ends where the exception is named; only the last traceback counts.
    """
    begins = [n for n, line in enumerate(above) if line.startswith(TRACEBACK)]
    frames = [
        (match[1], match[2])
        for line in above[begins[-1] if begins else 0 :]
        if (match := FRAME.match(line)) and not OURS.search(match[1])
    ]
    vllm = [
        f"{match[1]}:{line}"
        for file, line in frames
        if (match := OF_VLLM.fullmatch(file))
    ]
    others = [
        f"{'/'.join(Path(file).parts[-3:])}:{line}"
        for file, line in frames
        if not any(part.search(file) for part in (OF_VLLM, PYTHONS, LIBRARY))
    ]
    return next(reversed(others or vllm), None)


def _source(above: list[str]) -> str:
    """Find the line of code that a traceback ends with."""
    texts = (line.strip() for line in reversed(above))
    return next((text for text in texts if text.strip("^~ ")), "")
