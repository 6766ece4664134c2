# SPDX-License-Identifier: Apache-2.0
"""Direct reads in virtual time: what connectors/direct_read does, over links.

Its scheduler side and its ledgers are the real ones. In place of the network, a peer's
ledger is asked when half a round trip has passed, and what was read is validated there
when it has arrived. A peer forgets no offer for its age: reads end sooner than that.
"""

from __future__ import annotations

from asyncio import Future
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from connectors.direct_read.ledger import BlockLedger
from connectors.direct_read.lookups import OFFER_LIFETIME_S, Address, Found
from connectors.direct_read.protocol import Peer
from connectors.direct_read.puller import Pull
from connectors.direct_read.scheduler import DirectReadScheduler
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.links import Links
from fleet.virtual.loop import VirtualLoop
from lab.records.instances import Instance

# There is no memory to read.
PEER = Peer({}, [])


@dataclass(frozen=True)
class _Found(Found):
    """An offer that gets old by the virtual clock."""

    loop: VirtualLoop | None = None

    def is_stale(self) -> bool:
        return self.loop.time() > self.deadline_s


class Reads:
    """All direct reads under way in one fleet."""

    def __init__(self, links: Links, loop: VirtualLoop) -> None:
        self._links = links
        self._loop = loop
        self._ledgers: dict[Address, BlockLedger] = {}
        self._names: dict[Address, str] = {}
        # By engine: pulls that have ended, with the blocks that do not count.
        self._ended: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)

    def join(self, instance: Instance, engine: VirtualEngine) -> None:
        """The instance can read from all others, and they from it."""
        side: DirectReadScheduler = engine.core.scheduler.connector.connector_scheduler
        address = instance.direct_read.host, instance.direct_read.port
        self._ledgers[address] = side.ledger
        self._names[address] = instance.name
        side.lookups = self
        finish_step = side.finish_step
        # A step's call is made at once; its blocks are written when its forward ends.
        side.finish_step = lambda: self._loop.call_at_ns(
            engine.clock.now_ns, finish_step
        )

    def step(self, engine: str, metadata: Any, now_ns: int) -> KVConnectorOutput | None:
        """What the engine's worker does in a step, and what it then reports.

        `metadata` is a DirectReadMetadata.
        """
        for pull in metadata.pulls:
            peer = self._names[pull.host, pull.port]
            blocks = len(pull.block_ids)
            end_ns = self._links.carry(peer, engine, blocks, now_ns)
            self._loop.call_at_ns(end_ns, self._arrived, engine, pull)
        ended = self._ended.pop(engine, None)
        if ended is None:
            return None
        return KVConnectorOutput(
            # A list: blocks are freed in the same order in every process.
            finished_recving=[request_id for request_id, _ in ended],
            invalid_block_ids={block for _, failed in ended for block in failed},
        )

    def ask(self, address: Address, hashes: list[bytes]) -> Future[Found]:
        """As connectors.direct_read.lookups: what the peer at `address` has."""
        answer: Future[Found] = self._loop.create_future()
        deadline_s = self._loop.time() + OFFER_LIFETIME_S

        def looked_up() -> None:
            offer = self._ledgers[address].lookup(hashes)
            found = _Found(offer, PEER, deadline_s, loop=self._loop)
            self._after_latency(answer.set_result, found)

        self._after_latency(looked_up)
        return answer

    def _after_latency(self, callback: Any, *args: Any) -> None:
        due_ns = self._loop.now_ns() + self._links.latency_ns
        self._loop.call_at_ns(due_ns, callback, *args)

    def _arrived(self, engine: str, pull: Pull) -> None:
        valid = self._ledgers[pull.host, pull.port].validate(pull.token) - pull.skipped
        failed = pull.block_ids[max(valid, 0) :]
        self._ended[engine].append((pull.request_id, failed))
