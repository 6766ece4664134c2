# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: continuous batching with chunked prefill, and a prefix cache.

Prefills make the decodes beside them slower, as they do in vLLM.

A step takes `step_us`, `decode_us` for each sequence that decodes and
`prefill_us_per_token` for each prompt token computed. Memory is not simulated: no
sequence waits for blocks and none is preempted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from time import perf_counter_ns

import msgspec
import numpy as np
import numpy.typing as npt
from kvtax_fleet.records.exposition import Gauges, Totals

from kvtax.load.alarm import Alarm

OUTPUT_TOKEN = 1
Ids = npt.NDArray[np.int32]


class Shape(msgspec.Struct, frozen=True):
    """Sizes of the engine, and times of its steps."""

    block_tokens: int = 16
    num_blocks: int = 20_000
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_model_len: int = 131_072
    step_us: float = 0.0
    decode_us: float = 0.0
    prefill_us_per_token: float = 0.0
    transfer_us_per_token: float = 0.0


class BlockCache:
    """A prefix cache of full blocks under chained hashes; the oldest use is evicted.

    Blocks in use are not pinned, unlike vLLM's.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hashes(self, tokens: Ids) -> list[int]:
        """Return a hash for each full block of tokens and all that is before it."""
        data, size = tokens.tobytes(), self.block_tokens * tokens.itemsize
        hashes, parent = [], 0
        for start in range(0, len(data) - size + 1, size):
            parent = hash((parent, data[start : start + size]))
            hashes.append(parent)
        return hashes

    def hit_tokens(self, hashes: list[int], prompt_tokens: int) -> int:
        """Return the tokens of the longest cached prefix, without the last token."""
        usable = (prompt_tokens - 1) // self.block_tokens
        blocks = 0
        while blocks < usable and hashes[blocks] in self._blocks:
            blocks += 1
        self._use(hashes[:blocks])
        return blocks * self.block_tokens

    def insert(self, hashes: list[int]) -> None:
        """Cache these blocks of one sequence."""
        for key in hashes:
            self._blocks[key] = None
        self._use(hashes)
        while len(self._blocks) > self.num_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def _use(self, hashes: list[int]) -> None:
        # The end of a sequence is evicted before its beginning, as in vLLM.
        for key in reversed(hashes):
            self._blocks.move_to_end(key)


class Sequence:
    """One request in the engine. `received` tokens of KV came from another instance."""

    def __init__(self, tokens: Ids, max_tokens: int, received: int = 0) -> None:
        self.tokens = tokens
        self.prompt_tokens = len(tokens)
        self.max_tokens = max_tokens
        self.received = received
        self.hashes: list[int] = []
        self.cached = self.external = self.computed = self.made = 0
        self.aborted = False
        self.changed = asyncio.Event()


class Engine:
    """Runs all sequences of one instance; `run` must be running."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.cache = BlockCache(shape.num_blocks, shape.block_tokens)
        self.totals = Totals()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._work = asyncio.Event()

    @property
    def gauges(self) -> Gauges:
        usage = len(self.cache) / self.cache.num_blocks
        return Gauges(len(self.running), len(self.waiting), usage)

    async def generate(self, sequence: Sequence) -> AsyncGenerator[int, None]:
        """Yield the number of tokens made since the last time, until all are made.

        Closing it early takes the sequence out of the engine.
        """
        sequence.hashes = self.cache.hashes(sequence.tokens)
        self.waiting.append(sequence)
        self._work.set()
        yielded = 0
        try:
            while yielded < sequence.max_tokens:
                await sequence.changed.wait()
                sequence.changed.clear()
                made = sequence.made
                yield made - yielded
                yielded = made
        finally:
            if sequence.made < sequence.max_tokens:
                self._abort(sequence)

    async def run(self) -> None:
        """Step until cancelled."""
        with Alarm() as alarm:
            end_ns = 0
            while True:
                if not (self.running or self.waiting):
                    self._work.clear()
                    await self._work.wait()
                start_ns = perf_counter_ns()
                chunks = self._schedule()
                cost_ns = self._cost_ns(chunks)
                # From the planned end of the step before, so that our own time counts
                # only where it is more than what is simulated.
                end_ns = max(end_ns, start_ns) + cost_ns
                if cost_ns:
                    await alarm.sleep_until(end_ns)
                await asyncio.sleep(0)
                self._finish_step(chunks)

    def reset(self) -> bool:
        """Empty the prefix cache, unless a request is in the engine."""
        if self.running or self.waiting:
            return False
        self.cache.clear()
        return True

    def _schedule(self) -> dict[Sequence, int]:
        """Return the tokens to compute for each sequence, running ones first."""
        budget = self.shape.max_batched_tokens
        chunks: dict[Sequence, int] = {}
        for sequence in self.running:
            chunk = min(budget, max(1, sequence.prompt_tokens - sequence.computed))
            if chunk:
                chunks[sequence] = chunk
                budget -= chunk
        while self.waiting and budget and len(self.running) < self.shape.max_num_seqs:
            sequence = self.waiting.popleft()
            self._admit(sequence)
            self.running.append(sequence)
            chunk = min(budget, sequence.prompt_tokens - sequence.computed)
            chunks[sequence] = chunk
            budget -= chunk
        return chunks

    def _admit(self, sequence: Sequence) -> None:
        hit = self.cache.hit_tokens(sequence.hashes, sequence.prompt_tokens)
        sequence.external = max(0, sequence.received - hit)
        sequence.cached = sequence.computed = hit + sequence.external
        self.totals.prefix_cache_queries += sequence.prompt_tokens
        self.totals.prefix_cache_hits += hit

    def _cost_ns(self, chunks: dict[Sequence, int]) -> int:
        prefill = decodes = 0
        for sequence, chunk in chunks.items():
            if sequence.computed < sequence.prompt_tokens:
                prefill += chunk
            else:
                decodes += 1
        shape = self.shape
        cost_us = shape.step_us + shape.decode_us * decodes
        return int(1e3 * (cost_us + shape.prefill_us_per_token * prefill))

    def _finish_step(self, chunks: dict[Sequence, int]) -> None:
        for sequence, chunk in chunks.items():
            if sequence.aborted:
                continue
            prefilling = sequence.computed < sequence.prompt_tokens
            sequence.computed += chunk
            if sequence.computed < sequence.prompt_tokens:
                continue
            if prefilling:
                self._end_prefill(sequence)
            sequence.made += 1
            self.totals.generation_tokens += 1
            sequence.changed.set()
            if sequence.made == sequence.max_tokens:
                self._finish(sequence)

    def _end_prefill(self, sequence: Sequence) -> None:
        self.cache.insert(sequence.hashes)
        self.totals.computed_tokens += sequence.prompt_tokens - sequence.cached
        self.totals.cached_tokens += sequence.cached - sequence.external
        self.totals.external_tokens += sequence.external

    def _finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.totals.finished += 1
        tail = np.full(sequence.max_tokens - 1, OUTPUT_TOKEN, np.int32)
        self.cache.insert(self.cache.hashes(np.concatenate([sequence.tokens, tail])))

    def _abort(self, sequence: Sequence) -> None:
        sequence.aborted = True
        self.totals.aborted += 1
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
