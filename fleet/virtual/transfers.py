# SPDX-License-Identifier: Apache-2.0
"""KV on its way between instances: what Mooncake's workers do, over links.

The connector's scheduler side, which is vLLM's own, says with each step what may be
sent and what is to be pulled. A pull begins when the prefill has ended and the links of
both are free. Each side tells its scheduler with its next step after the end, as a
worker does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from vllm import envs
from vllm.v1.outputs import KVConnectorOutput

from fleet.virtual.engine import VirtualEngine
from fleet.virtual.links import Links, told
from lab.records.instances import Instance


class _End(NamedTuple):
    """One end of a transfer: whose, since when, and how many blocks it wants."""

    engine: str
    request_id: str
    since_ns: int
    blocks: int = 0


class Transfers:
    """All KV under way in one fleet."""

    def __init__(self, links: Links) -> None:
        self._links = links
        # By transfer id, as long as the other end is not there.
        self._held: dict[str, _End] = {}
        self._pulls: dict[str, _End] = {}
        self._begun_ns: dict[str, int] = {}
        self._dropped: set[str] = set()
        # By engine: (end, request) of what is under way.
        self._sending: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._receiving: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def join(self, instance: Instance, engine: VirtualEngine) -> None:
        """The proxy names a sender by its instance: nothing else need be known."""

    def step(self, engine: str, metadata: Any, now_ns: int) -> KVConnectorOutput | None:
        """What the engine's worker does in a step, and what it then reports.

        `metadata` is vLLM's MooncakeConnectorMetadata.
        """
        for request_id, (transfer_id, block_ids) in metadata.reqs_to_send.items():
            # Without blocks, the prefill has only begun.
            if block_ids:
                self._held[transfer_id] = _End(engine, request_id, now_ns)
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
        return told(self._sending[engine], self._receiving[engine], now_ns)

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
        self._sending[held.engine].append((end_ns, held.request_id))
        self._arrive(pull, end_ns)

    def _arrive(self, pull: _End, end_ns: int) -> None:
        """Pulls of nothing, which free the sender's blocks, are not reported."""
        if pull.blocks:
            self._receiving[pull.engine].append((end_ns, pull.request_id))

    def _drop(self, transfer_id: str, now_ns: int) -> None:
        """There is nothing to send: the proxy has given both requests up."""
        self._dropped.add(transfer_id)
        self._begun_ns.pop(transfer_id, None)
        if pull := self._pulls.pop(transfer_id, None):
            self._arrive(pull, now_ns)

    def _expire(self, engine: str, now_ns: int) -> None:
        """Nothing is held for longer than Mooncake holds it."""
        oldest_ns = now_ns - envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT * 10**9
        for transfer_id, held in list(self._held.items()):
            if held.engine == engine and held.since_ns < oldest_ns:
                del self._held[transfer_id]
                self._dropped.add(transfer_id)
                self._begun_ns.pop(transfer_id, None)
                self._sending[engine].append((now_ns, held.request_id))
