# SPDX-License-Identifier: Apache-2.0
"""An engine core that is held at one level of one axis after the other.

Run by kvtax.axes.cell on a patched vLLM of some release, whose step records tell
what the steps took. Nothing here takes a time. It says which steps belong to which
level.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from kvtax.axes import GIVEN
from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

HELD_BATCH, HELD_TOKENS = 8, 4 * BLOCK_SIZE
FILLING_TOKENS = 256 * BLOCK_SIZE
FRAGMENTED_BLOCKS = 64
# More than 25 of the longest prompts take: none gets the blocks of one before.
PROMPT_POOL_BLOCKS = 16_384
# At 131,072 tokens of context each, as many as the cache has room for.
LONG_BATCH = 4
# The first steps at a level run with the processor's caches of the one before.
COLD_STEPS = 5
# A batch that is prefilled in chunks decodes as a whole only after so many steps.
PREFILL_STEPS = 200
# A connector may hold what has ended until it has saved it.
FINISH_DEADLINE_S = 120.0
HELD_PAUSE_S = 0.002

Ranges = list[tuple[int, int]]


class Scheduler(Protocol):
    """Attributes of vLLM's scheduler that its interface does not declare."""

    kv_cache_manager: KVCacheManager
    connector: KVConnectorBase_V1 | None
    requests: dict[str, Request]


class SteppedEngine(NullEngine):
    """An engine that can be taken to a level of each axis, and counts its steps."""

    def __init__(self, model: Path, kv_transfer: dict | None, sizes: dict) -> None:
        super().__init__(model, kv_transfer, **sizes)
        self._steps = 0
        self._prompts = count()
        self._scheduler = cast(Scheduler, self.core.scheduler)

    def cache(self, levels: list[int], steps: int) -> Ranges:
        """At each number of cached blocks, from an empty cache on."""
        self._forget()
        found = []
        for blocks in levels:
            self._fill(blocks)
            found.append(self._decode(HELD_BATCH, HELD_TOKENS, steps))
        return found

    def running(self, levels: list[int], steps: int) -> Ranges:
        """At each number of requests that decode."""
        return [self._anew(batch, HELD_TOKENS, steps) for batch in levels]

    def context(self, levels: list[int], steps: int) -> Ranges:
        """At each number of tokens that a decoding request attends to."""
        return [self._anew(LONG_BATCH, tokens, steps) for tokens in levels]

    def arrivals(self, levels: list[int], steps: int) -> Ranges:
        """At each number of requests that arrive, and end, in every step."""
        found = []
        for each in levels:
            self._forget()
            found.append(self._arriving(each, HELD_TOKENS, steps))
        return found

    def prompt(self, levels: list[int], steps: int) -> Ranges:
        """At each length of the prompt of a request that arrives, and ends, in a step.

        The pool is small and full, so as many blocks are cached at all levels; and in
        order, so a prompt's blocks are neighbours.
        """
        self._forget()
        queue = self._pool.free_block_queue
        self._scatter(queue.num_free_blocks)
        kept_out = queue.popleft_n(queue.num_free_blocks - PROMPT_POOL_BLOCKS)
        self._fill(PROMPT_POOL_BLOCKS - FILLING_TOKENS // BLOCK_SIZE)
        found = []
        for tokens in levels:
            self._scatter(PROMPT_POOL_BLOCKS)
            found.append(self._arriving(1, tokens, steps))
        queue.append_n(kept_out)
        return found

    def fragments(self, levels: list[int], steps: int) -> Ranges:
        """At each number of runs of neighbours that an arriving request's blocks are.

        One request of FRAGMENTED_BLOCKS arrives, and ends, in every step.
        """
        found = []
        for fragments in levels:
            self._forget()
            self._scatter(FRAGMENTED_BLOCKS // fragments)
            found.append(self._arriving(1, FRAGMENTED_BLOCKS * BLOCK_SIZE, steps))
        return found

    @property
    def has_tier(self) -> bool:
        """Return whether the connector keeps KV of its own, and can forget it."""
        connector = self._scheduler.connector
        return connector is not None and "reset_cache" in vars(type(connector))

    def tier(self, levels: list[int], steps: int) -> Ranges:
        """At each number of blocks that were computed and left to the connector."""
        self._forget()
        connector = self._scheduler.connector
        if connector is None:
            raise RuntimeError("there is no connector to have a tier")
        assert connector.reset_cache() is not False
        found, stored = [], 0
        for blocks in levels:
            while stored < blocks:
                self.add(self._prompt(FILLING_TOKENS), 1)
                self._finish()
                stored += FILLING_TOKENS // BLOCK_SIZE
            found.append(self._anew(HELD_BATCH, HELD_TOKENS, steps))
        return found

    @property
    def _pool(self) -> BlockPool:
        return self._scheduler.kv_cache_manager.block_pool

    def _fill(self, blocks: int) -> None:
        """Compute prompts until at least so many blocks are cached."""
        while len(self._pool.cached_block_hash_to_block) < blocks:
            self.add(self._prompt(FILLING_TOKENS), 1)
            self._finish()

    def _anew(self, batch: int, tokens: int, steps: int) -> tuple[int, int]:
        self._forget()
        return self._decode(batch, tokens, steps)

    def _decode(self, batch: int, tokens: int, steps: int) -> tuple[int, int]:
        """[first, end) of `steps` steps in which all of `batch` requests decode."""
        self._start(batch, tokens, steps)
        first = self._steps
        for _ in range(steps):
            self._step()
        self._end()
        return first, first + steps

    def _arriving(self, each: int, tokens: int, steps: int) -> tuple[int, int]:
        self._start(HELD_BATCH, HELD_TOKENS, steps)
        first = self._steps
        for _ in range(steps):
            for _ in range(each):
                self.add(self._prompt(tokens), 1)
            self._step()
        self._end()
        return first, first + steps

    def _scatter(self, run: int) -> None:
        """Have the pool hand out runs of `run` neighbours, none next to the one before.

        A request may get the end of one run first, so it has one fragment more.
        """
        queue = self._pool.free_block_queue
        free = queue.popleft_n(queue.num_free_blocks)
        free.sort(key=lambda block: block.block_id)
        runs = [free[first : first + run] for first in range(0, len(free), run)]
        queue.append_n(list(chain.from_iterable(runs[::2] + runs[1::2])))

    def _start(self, batch: int, tokens: int, steps: int) -> None:
        for _ in range(batch):
            self.add(self._prompt(tokens), PREFILL_STEPS + COLD_STEPS + steps)
        requests = self._scheduler.requests
        while any(one.num_computed_tokens < tokens for one in requests.values()):
            self._step()
        for _ in range(COLD_STEPS):
            self._step()

    def _end(self) -> None:
        self.core.abort_requests(list(self._scheduler.requests))
        self._finish()

    def _finish(self) -> None:
        deadline_s = time.monotonic() + FINISH_DEADLINE_S
        while self.core.scheduler.has_requests():
            if time.monotonic() > deadline_s:
                if self._scheduler.requests:
                    raise RuntimeError("requests do not end: the connector holds them")
                raise RuntimeError(
                    "the connector keeps an engine without requests stepping: "
                    "has_pending_push_work"
                )
            self._step()
            if not self.core.scheduler.get_num_unfinished_requests():
                # All are done but for the connector, which wants the core.
                time.sleep(HELD_PAUSE_S)

    def _forget(self) -> None:
        self._finish()
        assert self.core.scheduler.reset_prefix_cache()

    def _step(self) -> None:
        self.core.step()
        self._steps += 1

    def _prompt(self, tokens: int) -> list[int]:
        """One that shares no block with any other of the first million."""
        high, low = divmod(next(self._prompts), 1_000)
        return [high + 1, low + 1] * (tokens // 2)


def ranges(engine: SteppedEngine, axis: str, levels: list[int], steps: int) -> Ranges:
    """[first, end) of the steps at each level of `axis`, by step_id."""
    return getattr(engine, axis)(levels, steps)


def has_tier(engine: SteppedEngine) -> bool:
    return engine.has_tier


def main() -> None:
    model, socket = sys.argv[1:]
    given = json.loads(os.environ.pop(GIVEN))
    engine = SteppedEngine(Path(model), given["kv_transfer"], given["sizes"])
    serve(engine, socket, ranges, has_tier)


if __name__ == "__main__":
    main()
