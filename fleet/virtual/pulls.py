# SPDX-License-Identifier: Apache-2.0
"""KV on its way between instances: what NIXL's workers do, over links.

Here the prefill has ended before its KV is asked for: vLLM's own connector says with
each step what is held to be read, and what is to be read from whom. The reader's worker
reports the end of a read; it also tells the one who holds the blocks, half a round trip
later. The handshake before a pair's first read takes no time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm import envs
from vllm.v1.outputs import KVConnectorOutput

from fleet.virtual.engine import VirtualEngine
from fleet.virtual.links import Links, told
from lab.records.instances import Instance


class Pulls:
    """All KV under way in one fleet."""

    def __init__(self, links: Links) -> None:
        self._links = links
        # By the id that vLLM gives an engine.
        self._names: dict[str, str] = {}
        # By engine: until when it holds what for a reader.
        self._held_until_ns: dict[str, dict[str, int]] = defaultdict(dict)
        # By engine: (end, request) of what is under way.
        self._sending: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._receiving: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def join(self, instance: Instance, engine: VirtualEngine) -> None:
        """The instance can read from all others, and they from it."""
        transfer = engine.core.vllm_config.kv_transfer_config
        self._names[transfer.engine_id] = instance.name

    def step(self, engine: str, metadata: Any, now_ns: int) -> KVConnectorOutput | None:
        """What the engine's worker does in a step, and what it then reports.

        `metadata` is vLLM's NixlConnectorMetadata.
        """
        limit_ns = envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT * 10**9
        for request_id in metadata.reqs_to_send:
            self._held_until_ns[engine][request_id] = now_ns + limit_ns
        for request_id, pull in metadata.reqs_to_recv.items():
            self._read(engine, request_id, pull, now_ns)
        self._expire(engine, now_ns)
        return told(self._sending[engine], self._receiving[engine], now_ns)

    def _read(self, engine: str, request_id: str, pull: Any, now_ns: int) -> None:
        source = self._names[pull.remote.engine_id]
        blocks = sum(map(len, pull.local_block_ids))
        end_ns = now_ns
        if blocks:
            end_ns = self._links.carry(source, engine, blocks, now_ns)
            self._receiving[engine].append((end_ns, request_id))
        # Without blocks, which frees the holder's, nothing is reported here.
        held = pull.remote.request_id
        if self._held_until_ns[source].pop(held, None) is not None:
            self._sending[source].append((end_ns + self._links.latency_ns, held))

    def _expire(self, engine: str, now_ns: int) -> None:
        """Nothing is held for longer than NIXL holds it."""
        held = self._held_until_ns[engine]
        for request_id in [one for one, until in held.items() if until <= now_ns]:
            del held[request_id]
            self._sending[engine].append((now_ns, request_id))
