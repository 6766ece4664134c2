# SPDX-License-Identifier: Apache-2.0
"""Run the cells of a plan, each in a process of its own: started by fleet.experiment.

    python -m fleet.virtual PLAN.json JOBS

This process imports vLLM, which takes seconds, from the private tree that its
PYTHONPATH names; the cells are forks of it. A cell that comes to nothing leaves an
arm.json that says why.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing import Process, connection, get_context
from pathlib import Path

import msgspec

from fleet.virtual.cell import run_cell
from fleet.virtual.cost import StepCost
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.plan import Cell
from lab.records.arm import ArmRecord
from lab.records.documents import write_document


def main() -> None:
    plan, jobs = Path(sys.argv[1]), int(sys.argv[2])
    waiting = msgspec.json.decode(plan.read_bytes(), type=list[Cell])
    # What making an engine imports, the forks need not.
    first = waiting[0]
    cost = StepCost(first.forward, first.host)
    VirtualEngine(first.members[0].arguments, cost, first.overlapping)
    running: dict[int, tuple[Process, Cell]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            cell = waiting.pop(0)
            process = get_context("fork").Process(target=_run, args=(cell,))
            process.start()
            running[process.sentinel] = process, cell
        for sentinel in connection.wait(list(running)):
            process, cell = running.pop(sentinel)
            process.join()
            if process.exitcode < 0:
                _failed(cell, f"its process ended by signal {-process.exitcode}")


def _run(cell: Cell) -> None:
    try:
        run_cell(cell)
    except Exception as error:
        traceback.print_exc()
        _failed(cell, f"{type(error).__name__}: {error}")


def _failed(cell: Cell, why: str) -> None:
    folder = Path(cell.folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = msgspec.structs.asdict(cell.planned)
    write_document(folder / "arm.json", ArmRecord(**told, status="failed", error=why))


if __name__ == "__main__":
    main()
