# SPDX-License-Identifier: Apache-2.0
"""KV on its way between instances: what connectors' workers do over the links.

The scheduler side of a connector is the real one: it says with each step what may be
sent and what is to be pulled. Each engine learns of the end of a transfer with its next
step, as from a worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm import envs
from vllm.v1.outputs import KVConnectorOutput

from kvtax_fleet.records.instances import Instance
from kvtax_fleet.simulate.links import Links
from kvtax_fleet.simulate.virtual_engine import VirtualEngine

# The end in ns and the request of each transfer under way.
UnderWay = list[tuple[int, str]]
# Takes a time in ns.
Expect = Callable[[int], None]


class _Worker:
    """The ends of transfers that a fleet's workers report; base of both protocols."""

    def __init__(self, links: Links) -> None:
        self._links = links
        # By engine.
        self._sending: dict[str, UnderWay] = defaultdict(list)
        self._receiving: dict[str, UnderWay] = defaultdict(list)
        self._expect: dict[str, Expect] = defaultdict(lambda: _ignore)

    def announce(self, engine: str, expect: Expect) -> None:
        """Call `expect` with the time of each report of the engine's worker, before."""
        self._expect[engine] = expect

    def _sent(self, engine: str, end_ns: int, request_id: str) -> None:
        self._sending[engine].append((end_ns, request_id))
        self._expect[engine](end_ns)

    def _received(self, engine: str, end_ns: int, request_id: str) -> None:
        self._receiving[engine].append((end_ns, request_id))
        self._expect[engine](end_ns)

    def _report(self, engine: str, now_ns: int) -> KVConnectorOutput | None:
        """Return what the engine's worker reports; None if nothing has ended."""
        # Lists, where vLLM has sets: blocks are freed in the same order in every
        # process.
        sent: Any = _ended(self._sending[engine], now_ns)
        received: Any = _ended(self._receiving[engine], now_ns)
        if not sent and not received:
            return None
        return KVConnectorOutput(finished_sending=sent, finished_recving=received)


def _ignore(at_ns: int) -> None:
    """Do nothing, for an engine that does every step."""


def _ended(under_way: UnderWay, now_ns: int) -> list[str]:
    """Remove the transfers that have ended; return their requests in order."""
    ended = sorted(transfer for transfer in under_way if transfer[0] <= now_ns)
    under_way[:] = [transfer for transfer in under_way if transfer[0] > now_ns]
    return [request_id for _, request_id in ended]


class _End(NamedTuple):
    """One end of a Mooncake transfer: its engine, its time, the blocks it needs."""

    engine: str
    request_id: str
    since_ns: int
    blocks: int = 0


class MooncakeTransfers(_Worker):
    """All KV under way in a fleet with Mooncake.

    A pull begins when the prefill has ended and the links of both ends are free.
    """

    def __init__(self, links: Links) -> None:
        super().__init__(links)
        # By transfer id, until the other end is there.
        self._held: dict[str, _End] = {}
        self._pulls: dict[str, _End] = {}
        self._begun_ns: dict[str, int] = {}
        self._dropped: set[str] = set()

    @property
    def _held_for_ns(self) -> int:
        return envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT * 10**9

    def join(self, instance: Instance, engine: VirtualEngine) -> None:
        """Do nothing: the proxy names a sender by its instance."""

    def step(self, engine: str, metadata: Any, now_ns: int) -> KVConnectorOutput | None:
        """Do the work of the engine's worker in a step; return its report.

        `metadata` is vLLM's MooncakeConnectorMetadata.
        """
        for request_id, (transfer_id, block_ids) in metadata.reqs_to_send.items():
            # Without blocks, the prefill has only begun.
            if block_ids:
                self._held[transfer_id] = _End(engine, request_id, now_ns)
                self._expect[engine](now_ns + self._held_for_ns + 1)
                self._begin(transfer_id)
            else:
                self._begun_ns[transfer_id] = now_ns
        for pulls in metadata.reqs_to_recv.values():
            for request_id, pull in pulls.items():
                blocks = len(pull.local_block_ids)
                end = _End(engine, request_id, now_ns, blocks)
                self._pulls[pull.transfer_id] = end
                self._begin(pull.transfer_id)
        for transfer_id in metadata.reqs_not_processed:
            self._drop(transfer_id, now_ns)
        self._expire(engine, now_ns)
        return self._report(engine, now_ns)

    def _begin(self, transfer_id: str) -> None:
        """Put both ends on the links, once they are there."""
        pull = self._pulls.get(transfer_id)
        if pull is not None and transfer_id in self._dropped:
            self._arrive(self._pulls.pop(transfer_id), pull.since_ns)
        if pull is None or transfer_id not in self._held:
            return
        held = self._held.pop(transfer_id)
        del self._pulls[transfer_id]
        ready_ns = max(held.since_ns, pull.since_ns)
        begun_ns = max(self._begun_ns.pop(transfer_id, ready_ns), pull.since_ns)
        end_ns = self._links.carry(
            held.engine, pull.engine, pull.blocks, ready_ns, begun_ns
        )
        self._sent(held.engine, end_ns, held.request_id)
        self._arrive(pull, end_ns)

    def _arrive(self, pull: _End, end_ns: int) -> None:
        """Report a pull, unless it has no blocks and only frees the sender's."""
        if pull.blocks:
            self._received(pull.engine, end_ns, pull.request_id)

    def _drop(self, transfer_id: str, now_ns: int) -> None:
        """Drop a transfer whose requests the proxy has given up."""
        self._dropped.add(transfer_id)
        self._begun_ns.pop(transfer_id, None)
        if pull := self._pulls.pop(transfer_id, None):
            self._arrive(pull, now_ns)

    def _expire(self, engine: str, now_ns: int) -> None:
        """Free blocks that are held for longer than Mooncake holds them."""
        oldest_ns = now_ns - self._held_for_ns
        for transfer_id, held in list(self._held.items()):
            if held.engine == engine and held.since_ns < oldest_ns:
                del self._held[transfer_id]
                self._dropped.add(transfer_id)
                self._begun_ns.pop(transfer_id, None)
                self._sent(engine, now_ns, held.request_id)


class NixlTransfers(_Worker):
    """All KV under way in a fleet with NIXL.

    A prefill has ended before its KV is requested. The reader's worker reports the end
    of a read; it also notifies the holder of the blocks, half a round trip later. The
    handshake before a pair's first read takes no time.
    """

    def __init__(self, links: Links) -> None:
        super().__init__(links)
        # By the id that vLLM gives an engine.
        self._names: dict[str, str] = {}
        # By engine: the time until which it holds a request's blocks.
        self._held_until_ns: dict[str, dict[str, int]] = defaultdict(dict)

    def join(self, instance: Instance, engine: VirtualEngine) -> None:
        """Let the instance read from all others, and be read by them."""
        transfer = engine.core.vllm_config.kv_transfer_config
        assert transfer is not None
        self._names[str(transfer.engine_id)] = instance.name

    def step(self, engine: str, metadata: Any, now_ns: int) -> KVConnectorOutput | None:
        """Do the work of the engine's worker in a step; return its report.

        `metadata` is vLLM's NixlConnectorMetadata.
        """
        limit_ns = envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT * 10**9
        for request_id in metadata.reqs_to_send:
            self._held_until_ns[engine][request_id] = now_ns + limit_ns
            self._expect[engine](now_ns + limit_ns)
        for request_id, pull in metadata.reqs_to_recv.items():
            self._read(engine, request_id, pull, now_ns)
        self._expire(engine, now_ns)
        return self._report(engine, now_ns)

    def _read(self, engine: str, request_id: str, pull: Any, now_ns: int) -> None:
        source = self._names[pull.remote.engine_id]
        blocks = sum(map(len, pull.local_block_ids))
        end_ns = now_ns
        if blocks:
            end_ns = self._links.carry(source, engine, blocks, now_ns)
            self._received(engine, end_ns, request_id)
        # A read without blocks only frees the holder's, and is not reported.
        held = pull.remote.request_id
        if self._held_until_ns[source].pop(held, None) is not None:
            self._sent(source, end_ns + self._links.latency_ns, held)

    def _expire(self, engine: str, now_ns: int) -> None:
        """Free blocks that are held for longer than NIXL holds them."""
        held = self._held_until_ns[engine]
        for request_id in [
            held_id for held_id, until in held.items() if until <= now_ns
        ]:
            del held[request_id]
            self._sent(engine, now_ns, request_id)
