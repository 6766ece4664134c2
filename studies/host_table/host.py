# SPDX-License-Identifier: Apache-2.0
"""Write a file of fleet/configs/hosts/: the time of a host per step and per request.

Steps: from the cells of `kvtax axes`, in which an engine is alone on its core. Along
each axis of a cell, a line through the medians of its passes. The forward of these
engines is empty, so that a whole step is the host's.

Requests: from a run in real time, the time outside of the engine. Only requests that
met an idle engine count: others waited for the end of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from kvtax_fleet.analyze.arm_runs import read_arm
from kvtax_fleet.records.host_times import (
    HostTimes,
    RequestTime,
    RequestTimes,
    StepTime,
    StepTimes,
)

from kvtax.records import RecordsError
from kvtax.records.files import write_document
from kvtax.records.observatory_cell import CellRecord, read_cells
from kvtax.records.requests import ids_of_completion, read_engine_requests
from kvtax.records.steps import EngineHeader
from kvtax.stats.distribution import Floats
from kvtax.steps.step_file import read_steps
from studies.harness import main

# Share of the requests that count; the slowest tenth met something else.
USUAL = 0.9
# Requests that decode on the axis `context`, whose levels are tokens of each.
LONG_BATCH = 4
# Tokens of each request on the axis `running`.
HELD_TOKENS = 64
BLOCK_TOKENS = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the file to write, and what it is made of."""
    add = parser.add_argument
    add("out", type=Path, metavar="FILE", help="file of fleet/configs/hosts/ to write")
    add("--summary", required=True, help="which host this is")
    add(
        "--cells",
        type=Path,
        required=True,
        metavar="FILE",
        help="cells of kvtax axes, of one release: the time per step",
    )
    add(
        "--requests",
        type=Path,
        metavar="RUN_DIR",
        help="a run in real time: the time per request outside of the engine "
        "(default: none)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Returns the exit code. Raises RecordsError."""
    given = arguments.summary, arguments.cells, arguments.requests
    times = write_host_times(arguments.out, *given)
    print(f"wrote {arguments.out}: {', '.join(times.steps)}")
    return 0


def write_host_times(
    out: Path, summary: str, cells: Path, run_dir: Path | None
) -> HostTimes:
    """Write a host's file; without `run_dir`, requests take no time outside the engine.

    Raises RecordsError.
    """
    requests = RequestTimes() if run_dir is None else request_times(run_dir)
    times = HostTimes(summary, step_times(cells), requests)
    write_document(out, times)
    return times


def step_times(file: Path) -> dict[str, StepTimes]:
    """Return times by connector, from the cells in `file`. Raises RecordsError."""
    cells = read_cells(file)
    times = {cell.connector: host_steps(cell) for cell in cells if cell.error is None}
    if not times:
        raise RecordsError(f"{file}: no cell of kvtax axes in it")
    return times


def host_steps(cell: CellRecord) -> StepTimes:
    """Fit the times of one cell, which was measured."""
    levels: dict[str, dict[str, Floats]] = {"scheduler": {}, "worker": {}}
    for axis, means_us in cell.means_us.items():
        scheduler = np.median(means_us["scheduler_us"], axis=0)
        levels["scheduler"][axis] = scheduler
        levels["worker"][axis] = np.median(means_us["step_us"], axis=0) - scheduler
    return StepTimes(**{part: _time(cell, us) for part, us in levels.items()})


def _time(cell: CellRecord, us: dict[str, Floats]) -> StepTime:
    """Fit a line along each axis. Falling slopes are noise, and count as 0."""

    def along(axis: str) -> tuple[float, float]:
        """Return us per unit of the axis, and us at its 0."""
        slope, level = np.polyfit(cell.levels[axis], us[axis], 1)
        return float(slope), float(level)

    per_block = max(0.0, along("cache")[0])
    per_request, base = along("running")
    # More requests and longer ones cache more blocks, which have their own slope.
    per_request -= per_block * HELD_TOKENS / BLOCK_TOKENS
    per_token = along("context")[0] / LONG_BATCH - per_block / BLOCK_TOKENS
    return StepTime(
        base_us=_rounded(base),
        us_per_request=_rounded(per_request),
        us_per_new_request=_rounded(along("arrivals")[0]),
        us_per_1k_context_tokens=_rounded(1e3 * per_token),
        us_per_1k_cached_blocks=_rounded(1e3 * per_block),
    )


def _rounded(us: float) -> float:
    return round(max(0.0, us), 3)


def request_times(run_dir: Path) -> RequestTimes:
    """Return the times from all runs below `run_dir`. Raises RecordsError."""
    rows = [
        row
        for path in sorted(run_dir.rglob("engine_request.jsonl"))
        for row in _outside(path.parent)
    ]
    if len(rows) < 2:
        raise RecordsError(f"{run_dir}: no records of requests that met an idle engine")
    prompt_tokens, to_us, from_us = np.array(rows).T
    return RequestTimes(_line(prompt_tokens, to_us), _line(prompt_tokens, from_us))


def _outside(life: Path) -> Iterator[tuple[int, float, float]]:
    """Yield prompt tokens, us to the engine, us from it to the client's first token."""
    steps = read_steps(
        life / "engine_step.jsonl", EngineHeader, ("step_id", "t_ns", "step_us")
    ).frame.sort("step_id")
    began_ns = steps["t_ns"].to_numpy()
    ended_ns = began_ns + steps["step_us"].to_numpy() * 1e3
    requests = read_engine_requests(life / "engine_request.jsonl")
    arm = next(folder for folder in life.parents if (folder / "arm.json").is_file())
    hashed = requests.header.ids == "hashed"
    sent = {
        ids_of_completion(client.id)[hashed]: client
        for client in read_arm(arm).requests
        if client.status == "ok"
    }
    for request in requests.records:
        client = sent.get(request.id)
        before = int(np.searchsorted(began_ns, request.arrival_ns)) - 1
        if client is None or (before >= 0 and request.arrival_ns < ended_ns[before]):
            continue
        yield (
            request.prompt_tokens,
            (request.arrival_ns - client.sent_ns) / 1e3,
            (client.first_token_ns - ended_ns[request.first_token_step]) / 1e3,
        )


def _line(prompt_tokens: Floats, us: Floats) -> RequestTime:
    usual = us <= np.quantile(us, USUAL)
    slope, base = np.polyfit(prompt_tokens[usual] / 1e3, us[usual], 1)
    return RequestTime(
        round(max(0.0, float(base)), 1), round(max(0.0, float(slope)), 2)
    )


if __name__ == "__main__":
    main("host_table.host", __doc__, configure, run)
