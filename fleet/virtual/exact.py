# SPDX-License-Identifier: Apache-2.0
"""What the instances have cached, as their own KV events tell it, some time later.

Messages with events may be lost on the way, as ZMQ loses them where a receiver is slow.
kvindexd sees the gap with the next message and asks for what it missed; so does this.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from fleet.proxy.kvindexd import State
from fleet.virtual.client import VirtualBody
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.loop import VirtualLoop


@dataclass
class _Known:
    """What is known of an instance.

    Equal blocks may be cached more than once: each is told, and each removed. `missed`
    are messages that were lost, `due_ns` is when the last one that was not is here.
    """

    blocks: Counter[int] = field(default_factory=Counter)
    missed: list[KVCacheEvent] = field(default_factory=list)
    due_ns: int = 0


class VirtualIndex:
    """fleet.proxy.kvindexd.Exact: knows each event of an engine's step `delay_ns` after
    that step's end, but for the share `loss` of the steps, drawn by `chance`.
    """

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        loop: VirtualLoop,
        delay_ns: int,
        block_tokens: int,
        loss: float = 0.0,
        chance: random.Random | None = None,
    ) -> None:
        self._loop = loop
        self._delay_ns = delay_ns
        self._block_tokens = block_tokens
        self._loss = loss
        self._chance = chance or random.Random(0)
        self._known = {name: _Known() for name in engines}
        self._any_engine = next(iter(engines.values()))
        for name, engine in engines.items():
            engine.tell_events(partial(self._told, self._known[name]))

    async def cached_tokens(self, body: VirtualBody) -> list[int]:
        """As Exact says. vLLM computes the last token, so its block does not count."""
        whole = (len(body.raw.prompt) - 1) // self._block_tokens
        hashes = self._any_engine.block_hashes(body.raw.prompt)[:whole]
        return [
            self._block_tokens * sum(1 for _ in takewhile(known.__contains__, hashes))
            for known in (one.blocks for one in self._known.values())
        ]

    def states(self) -> dict[str, State]:
        """As kvindexd's, by instance."""
        return {
            name: State(
                name, True, 0, 0, self._block_tokens, {"GPU": one.blocks.total()}
            )
            for name, one in self._known.items()
        }

    def _told(self, known: _Known, events: list[KVCacheEvent], at_ns: int) -> None:
        if self._chance.random() < self._loss:
            known.missed += events
            return
        # To ask for what was missed, and to get it, takes as long twice more.
        ways = 3 if known.missed else 1
        known.due_ns = max(known.due_ns, at_ns + ways * self._delay_ns)
        told = [*known.missed, *events]
        known.missed.clear()
        self._loop.call_at_ns(known.due_ns, _apply, known.blocks, told)


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
