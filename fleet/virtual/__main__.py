# SPDX-License-Identifier: Apache-2.0
"""Run cells, each in a process of its own: started by fleet.experiment.

    python -m fleet.virtual PIPE JOBS

Each line that comes through the pipe names a file with a cell. This process imports
vLLM, which takes seconds, from the private tree that its PYTHONPATH names; the cells
are forks of it. A cell that comes to nothing leaves an arm.json that says why. The
process ends when nobody has the pipe open to write any more.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing import Process, connection, get_context
from pathlib import Path

import msgspec

from fleet.virtual.cell import run_cell
from fleet.virtual.cost import StepCost
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.failed import failed
from fleet.virtual.plan import Cell
from lab.serving.lines import Lines


def main() -> None:
    files, jobs = Lines(Path(sys.argv[1])), int(sys.argv[2])
    cores = os.sched_getaffinity(0)
    waiting: list[Path] = []
    running: dict[int, tuple[Process, Cell]] = {}
    first = True
    while files.open or waiting or running:
        while waiting and len(running) < jobs:
            cell = msgspec.json.decode(waiting.pop(0).read_bytes(), type=Cell)
            if first:
                _import_all(cell)
                first = False
            process = get_context("fork").Process(target=_run, args=(cell, cores))
            process.start()
            running[process.sentinel] = process, cell
        for ready in connection.wait([*running, *([files] if files.open else [])]):
            if ready in running:
                process, cell = running.pop(ready)
                process.join()
                if process.exitcode < 0:
                    failed(cell, f"its process ended by signal {-process.exitcode}")
            else:
                waiting += [Path(os.fsdecode(line)) for line in files.come()]


def _import_all(cell: Cell) -> None:
    """What making an engine imports, the forks need not."""
    cost = StepCost(cell.forward, cell.host)
    VirtualEngine(cell.members[0].arguments, cost, cell.overlapping)


def _run(cell: Cell, cores: set[int]) -> None:
    # vLLM brings an OpenMP that moves each fork to the first core alone.
    os.sched_setaffinity(0, cores)
    try:
        run_cell(cell)
    except Exception as error:
        traceback.print_exc()
        failed(cell, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
