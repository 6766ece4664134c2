# SPDX-License-Identifier: Apache-2.0
"""One run in virtual time: its files are those of a run in real time.

Nothing that goes into them knows the time of day, the machine or the process: the same
cell gives the same bytes.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleet.experiment.freshness import counted, judge
from fleet.instances import write_instances
from fleet.proxy.core import Core
from fleet.proxy.decision_log import DecisionLog
from fleet.proxy.metrics import Metrics
from fleet.proxy.tokens import Tokens
from fleet.replay.play import Player
from fleet.replay.preflight import Model, check_lengths, check_vocabulary
from fleet.replay.records import new_ledger
from fleet.replay.sessions import Session, group
from fleet.trace import read_trace
from fleet.virtual.client import MODEL, VirtualLink
from fleet.virtual.cost import StepCost
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.exact import VirtualIndex
from fleet.virtual.instance import VirtualInstance
from fleet.virtual.links import Links
from fleet.virtual.loop import VirtualLoop
from fleet.virtual.plan import Cell
from fleet.virtual.pulls import Pulls
from fleet.virtual.transfers import Transfers
from fleet.virtual.upstream import VirtualUpstream, probe
from lab.records.arm import ArmRecord, Freshness
from lab.records.decisions import DecisionsHeader
from lab.records.documents import write_document

if TYPE_CHECKING:
    from fleet.virtual.reads import Reads

# Lines of records are kept in memory for so long, in virtual time.
FLUSH_EVERY_S = 30.0


def run_cell(cell: Cell) -> None:
    """Fill the cell's folder. Files of an earlier attempt are removed first.

    Raises RecordsError and what the fleet's parts raise; then there is no arm.json.
    """
    folder = Path(cell.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _no_chance(cell.seed)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        fleet = _fleet(cell, loop)
        evidence = Freshness()
        for name, text in _keep_metrics(folder, fleet, "before").items():
            evidence.instances[name] = counted(text)
        judge(evidence)
        instances = [member.instance for member in cell.members]
        write_instances(folder / "instances.json", instances)
        replay_s = runner.run(_run(cell, folder, fleet, loop))
        _keep_metrics(folder, fleet, "after")
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
    workers = _workers(cell, loop)
    fleet = {}
    for member in cell.members:
        one = member.instance
        moves = partial(workers.step, one.name) if workers else None
        engine = VirtualEngine(member.arguments, cost, cell.overlapping, moves)
        if workers:
            workers.join(one, engine)
        fleet[one.name] = VirtualInstance(engine, loop, cell.requests)
    return fleet


def _workers(cell: Cell, loop: VirtualLoop) -> Transfers | Pulls | Reads | None:
    """What moves the fleet's KV, all of which has one connector; None: nothing does."""
    one = cell.members[0].instance
    links = Links(cell.transfer, one.block_tokens)
    if one.connector == "mooncake":
        return Transfers(links)
    if one.connector == "nixl":
        return Pulls(links)
    if one.connector == "direct_read":
        # Only a vLLM with the connector's patches can import it.
        from fleet.virtual.reads import Reads

        return Reads(links, loop)
    return None


def _index(
    cell: Cell, fleet: dict[str, VirtualInstance], loop: VirtualLoop
) -> VirtualIndex | None:
    if cell.proxy.cache != "exact":
        return None
    engines = {name: instance.engine for name, instance in fleet.items()}
    block_tokens = cell.members[0].instance.block_tokens
    chance = random.Random(f"{cell.seed}/{cell.planned.repeat}/events")
    return VirtualIndex(
        engines, loop, cell.event_delay_ns, block_tokens, cell.event_loss, chance
    )


def _no_chance(seed: int) -> None:
    """Have whatever draws, in vLLM too, draw the same in every process."""
    random.seed(seed)
    drawn = random.Random(seed)
    uuid.uuid4 = lambda: uuid.UUID(int=drawn.getrandbits(128), version=4)


async def _run(
    cell: Cell, folder: Path, fleet: dict[str, VirtualInstance], loop: VirtualLoop
) -> float:
    """Replay everything; how long that took, in s."""
    sessions = drawn_sessions(cell)
    check_vocabulary(sessions, cell.vocab_size)
    check_lengths(sessions, Model(MODEL, cell.max_model_len))
    instances = [member.instance for member in cell.members]
    settings = msgspec.structs.asdict(cell.proxy)
    header = DecisionsHeader(**settings, instances=instances)
    told = {
        "model": MODEL,
        "max_model_len": cell.max_model_len,
        "scheduled": sum(len(session.turns) for session in sessions),
        "sessions": len(sessions),
        "trace_sha256": cell.planned.trace.sha256,
    }
    with ExitStack() as stack:
        log = DecisionLog(folder / "decisions.jsonl", header, loop.now_ns)
        decisions = stack.enter_context(log)
        ledger = new_ledger(folder / "replay.jsonl", cell.replay, **told)
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
        link = VirtualLink(
            loop, core.handler.handle, cell.vocab_size, cell.replay.timeout_s
        )
        player = Player(cell.replay, sessions, link, records)
        beside = [
            asyncio.create_task(core.health.poll_forever(probe)),
            asyncio.create_task(_flush(records, decisions)),
        ]
        await player.play()
        for task in beside:
            task.cancel()
        player.end()
    states = index.states() if index else {}
    breakdown = msgspec.json.encode(Metrics(core, Tokens(None)).breakdown(states))
    (folder / "breakdown.json").write_bytes(breakdown)
    return loop.time()


def drawn_sessions(cell: Cell) -> list[Session]:
    """The trace's sessions; after repeat 0, each begins when another one did there."""
    sessions = group(read_trace(cell.trace), cell.replay.request_limit)
    if cell.planned.repeat == 0:
        return sessions
    arrivals_s = [session.turns[0].arrival_s for session in sessions]
    random.Random(f"{cell.seed}/{cell.planned.repeat}").shuffle(sessions)
    for session, arrival_s in zip(sessions, arrivals_s, strict=True):
        first = msgspec.structs.replace(session.turns[0], arrival_s=arrival_s)
        session.turns[0] = first
    return sessions


async def _flush(*files) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        for file in files:
            file.flush().result()


def _keep_metrics(
    folder: Path, fleet: dict[str, VirtualInstance], moment: str
) -> dict[str, str]:
    texts = {name: instance.metrics(MODEL) for name, instance in fleet.items()}
    (folder / "metrics").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "metrics" / f"{name}.{moment}.prom").write_text(text)
    return texts
