# SPDX-License-Identifier: Apache-2.0
"""Run cells, each in a process of its own: started by kvtax_fleet.experiment.

    python -m kvtax_fleet.simulate.run_cells JOBS FILE...

A file has a cell. This process imports vLLM, which takes seconds, with the overlay on
its PYTHONPATH; cells are forks of it. A cell that fails leaves an arm.json that says
why.

The files of a cell are those of a run in real time. Nothing in them depends on the time
of day, the machine or the process: the same cell gives the same bytes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import sys
import traceback
import uuid
from contextlib import ExitStack
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import msgspec
from kvtax.proc.supervise import remove_openmp_segment
from kvtax.records.files import LineFile, write_document

from kvtax_fleet.experiment.freshness import counted, judge, keep_metrics
from kvtax_fleet.instances import write_instances
from kvtax_fleet.proxy.breakdown import breakdown_of
from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.settings import header_of
from kvtax_fleet.records.arm import ArmRecord, Freshness
from kvtax_fleet.replay.http_link import check_vocabulary
from kvtax_fleet.replay.play import Player
from kvtax_fleet.replay.sessions import Session, group, new_ledger
from kvtax_fleet.simulate.cells import Cell, write_failed
from kvtax_fleet.simulate.cost import StepCost
from kvtax_fleet.simulate.endpoints import (
    MODEL,
    VirtualIndex,
    VirtualLink,
    VirtualUpstream,
)
from kvtax_fleet.simulate.links import Links
from kvtax_fleet.simulate.transfers import (
    MooncakeTransfers,
    NixlTransfers,
)
from kvtax_fleet.simulate.virtual_engine import VirtualEngine
from kvtax_fleet.simulate.virtual_instance import VirtualInstance
from kvtax_fleet.simulate.virtual_loop import VirtualLoop
from kvtax_fleet.trace import read_trace

# Virtual seconds for which lines of records stay in memory.
FLUSH_EVERY_S = 30.0


def main() -> None:
    """Run the cells in the files, JOBS at a time."""
    jobs, *files = sys.argv[1:]
    cores = os.sched_getaffinity(0)
    waiting = [
        msgspec.json.decode(Path(file).read_bytes(), type=Cell) for file in files
    ]
    _import_all(waiting[0])
    # Cells make no garbage of what is imported: the collector need not look at it.
    gc.freeze()
    running: dict[Any, tuple[ForkProcess, Cell]] = {}
    while waiting or running:
        while waiting and len(running) < int(jobs):
            cell = waiting.pop(0)
            process = get_context("fork").Process(
                target=_run_or_fail, args=(cell, cores)
            )
            process.start()
            running[process.sentinel] = process, cell
        for ended in connection.wait([*running]):
            process, cell = running.pop(ended)
            process.join()
            assert process.pid is not None
            remove_openmp_segment(process.pid)
            # Not even the reason was written, or it was killed.
            if status := process.exitcode:
                why = f"signal {-status}" if status < 0 else f"status {status}"
                write_failed(cell, f"its process ended by {why}")


def _import_all(cell: Cell) -> None:
    """Import the engine's modules before forking, so that children share them."""
    cost = StepCost(cell.forward, cell.host)
    VirtualEngine(cell.members[0].arguments, cost, cell.overlapping)


def _run_or_fail(cell: Cell, cores: set[int]) -> None:
    # vLLM brings an OpenMP that moves each fork to the first core alone.
    os.sched_setaffinity(0, cores)
    try:
        run_cell(cell)
    except Exception as error:
        traceback.print_exc()
        write_failed(cell, f"{type(error).__name__}: {error}")


def run_cell(cell: Cell) -> None:
    """Fill the cell's folder, without files of an earlier attempt.

    Raises RecordsError and what the fleet's parts raise; then there is no arm.json.
    """
    folder = Path(cell.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _fix_chance(cell.seed)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        fleet = _fleet(cell, loop)
        evidence = Freshness()
        texts = {name: member.metrics(MODEL) for name, member in fleet.items()}
        keep_metrics(folder, "before", texts)
        evidence.instances = {name: counted(text) for name, text in texts.items()}
        judge(evidence)
        instances = [member.instance for member in cell.members]
        write_instances(folder / "instances.json", instances)
        replay_s = runner.run(_run(cell, folder, fleet, loop))
        texts = {name: member.metrics(MODEL) for name, member in fleet.items()}
        keep_metrics(folder, "after", texts)
    record = ArmRecord(
        **msgspec.structs.asdict(cell.planned),
        instances=instances,
        patches=cell.patches,
        freshness=evidence,
        status="ok",
        ready_s=0.0,
        replay_s=replay_s,
    )
    write_document(folder / "arm.json", record)


def _fleet(cell: Cell, loop: VirtualLoop) -> dict[str, VirtualInstance]:
    cost = StepCost(cell.forward, cell.host)
    workers = _workers(cell)
    fleet = {}
    for member in cell.members:
        instance = member.instance
        moves = partial(workers.step, instance.name) if workers else None
        engine = VirtualEngine(member.arguments, cost, cell.overlapping, moves)
        if workers:
            workers.join(instance, engine)
        announce = partial(workers.announce, instance.name) if workers else None
        fleet[instance.name] = VirtualInstance(engine, loop, cell.requests, announce)
    return fleet


def _workers(cell: Cell) -> MooncakeTransfers | NixlTransfers | None:
    instance = cell.members[0].instance
    links = Links(cell.transfer, instance.block_tokens)
    if instance.connector == "mooncake":
        return MooncakeTransfers(links)
    if instance.connector == "nixl":
        return NixlTransfers(links)
    return None


def _index(
    cell: Cell, fleet: dict[str, VirtualInstance], loop: VirtualLoop
) -> VirtualIndex | None:
    if cell.proxy.cache != "exact":
        return None
    engines = {name: instance.engine for name, instance in fleet.items()}
    return VirtualIndex(engines, loop, cell.members[0].instance.block_tokens)


def _fix_chance(seed: int) -> None:
    """Make all random draws, in vLLM too, the same in every process."""
    random.seed(seed)
    chance = random.Random(seed)
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)


async def _run(
    cell: Cell, folder: Path, fleet: dict[str, VirtualInstance], loop: VirtualLoop
) -> float:
    sessions = drawn_sessions(cell)
    check_vocabulary(sessions, cell.vocab_size)
    instances = [member.instance for member in cell.members]
    header = header_of(cell.proxy, instances)
    assert cell.planned.trace is not None
    facts = {
        "model": MODEL,
        "max_model_len": cell.max_model_len,
        "scheduled": sum(len(session.turns) for session in sessions),
        "sessions": len(sessions),
        "trace_sha256": cell.planned.trace.sha256,
    }
    with ExitStack() as stack:
        log = DecisionLog(folder / "decisions.jsonl", header, loop.now_ns)
        decisions = stack.enter_context(log)
        ledger = new_ledger(folder / "replay.jsonl", cell.replay, **facts)
        records = stack.enter_context(ledger)
        index = _index(cell, fleet, loop)
        core = Core(
            instances,
            cell.proxy,
            VirtualUpstream(fleet),
            decisions,
            index,
            now_ns=loop.now_ns,
        )
        link = VirtualLink(loop, core.handle, cell.vocab_size, cell.replay.timeout_s)
        player = Player(cell.replay, sessions, link, records)
        background = [
            asyncio.create_task(core.read_gauges_forever()),
            asyncio.create_task(_flush(records, decisions)),
        ]
        await player.play()
        for task in background:
            if task.done():
                # It failed: it has no other end.
                task.result()
            task.cancel()
        player.end()
    breakdown = breakdown_of(core, index.tokens() if index else {})
    (folder / "breakdown.json").write_bytes(msgspec.json.encode(breakdown))
    return loop.time()


def drawn_sessions(cell: Cell) -> list[Session]:
    """Return the trace's sessions; after repeat 0, their arrivals are shuffled."""
    sessions = group(read_trace(cell.trace))
    if cell.planned.repeat == 0:
        return sessions
    arrivals_s = [session.turns[0].arrival_s for session in sessions]
    random.Random(f"{cell.seed}/{cell.planned.repeat}").shuffle(sessions)
    for session, arrival_s in zip(sessions, arrivals_s, strict=True):
        first = msgspec.structs.replace(session.turns[0], arrival_s=arrival_s)
        session.turns[0] = first
    return sessions


async def _flush(records: LineFile, decisions: DecisionLog) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        records.flush().result()
        decisions.flush()


if __name__ == "__main__":
    main()
