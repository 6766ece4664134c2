# SPDX-License-Identifier: Apache-2.0
"""What the instances have cached, as their own KV events tell it, some time later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from fleet.proxy.kvindexd import State
from fleet.virtual.client import VirtualBody
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.loop import VirtualLoop


class VirtualIndex:
    """fleet.proxy.kvindexd.Exact: knows each event of an engine's step `delay_ns` after
    that step's end.
    """

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        loop: VirtualLoop,
        delay_ns: int,
        block_tokens: int,
    ) -> None:
        self._loop = loop
        self._delay_ns = delay_ns
        self._block_tokens = block_tokens
        # Equal blocks may be cached more than once: each is told, and each removed.
        self._blocks: dict[str, Counter[int]] = {name: Counter() for name in engines}
        self._any_engine = next(iter(engines.values()))
        for name, engine in engines.items():
            engine.tell_events(partial(self._told, self._blocks[name]))

    async def cached_tokens(self, body: VirtualBody) -> list[int]:
        """As Exact says. vLLM computes the last token, so its block does not count."""
        whole = (len(body.raw.prompt) - 1) // self._block_tokens
        hashes = self._any_engine.block_hashes(body.raw.prompt)[:whole]
        return [
            self._block_tokens * sum(1 for _ in takewhile(blocks.__contains__, hashes))
            for blocks in self._blocks.values()
        ]

    def states(self) -> dict[str, State]:
        """As kvindexd's, by instance."""
        return {
            name: State(name, True, 0, 0, self._block_tokens, {"GPU": blocks.total()})
            for name, blocks in self._blocks.items()
        }

    def _told(
        self, blocks: Counter[int], events: list[KVCacheEvent], at_ns: int
    ) -> None:
        self._loop.call_at_ns(at_ns + self._delay_ns, _apply, blocks, events)


def _apply(blocks: Counter[int], events: list[KVCacheEvent]) -> None:
    for event in events:
        if isinstance(event, BlockStored):
            blocks.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            for one in event.block_hashes:
                blocks[one] -= 1
                if not blocks[one]:
                    del blocks[one]
        else:
            blocks.clear()
