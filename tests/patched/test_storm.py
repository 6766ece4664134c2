# SPDX-License-Identifier: Apache-2.0
"""Direct read never accepts a wrong byte; without either safeguard it does.

A reader runs beside a busy engine with a real block pool. The engine thread schedules
as vLLM does: blocks are allocated, which evicts, and cached at once. A device thread
does the forward passes in order and writes each block's bytes only then, in pieces. The
reader looks up, copies in pieces, validates, and compares every accepted byte with its
hash.
"""

from __future__ import annotations

import hashlib
import queue
import random
import sys
import threading
import time
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from connectors.direct_read.ledger import BlockLedger

BLOCK_SIZE = 16
BLOCK_BYTES = 1 << 12
PIECES = 4
# The prompts want five times as many blocks as there are.
NUM_BLOCKS = 64
NUM_PROMPTS = 40
PROMPT_BLOCKS = 8
REQUESTS_A_STEP = 2
FORWARD_S = 4e-3
# Between the pieces that the reader copies: reads take up to eight forward passes.
READ_PAUSES_S = (0, 1e-5, 1e-5, 1e-3)

PROMPTS = [
    [hashlib.sha256(b"%d %d" % (prompt, n)).digest() for n in range(PROMPT_BLOCKS)]
    for prompt in range(NUM_PROMPTS)
]


def true_bytes(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_BYTES // len(block_hash))


class WithoutExclusion(BlockLedger):
    """Offers blocks as soon as they are cached."""

    def __init__(self, block_pool: BlockPool) -> None:
        super().__init__(block_pool)
        self._steps_done = 1 << 60


class WithoutValidation(BlockLedger):
    """Calls all valid that it offered."""

    def validate(self, token: int) -> int:
        held = self._held[token]
        super().validate(token)
        return len(held.blocks)


LEDGERS = {
    "as it is": BlockLedger,
    "without exclusion": WithoutExclusion,
    "without validation": WithoutValidation,
}

Work = list[tuple[int, bytes]]


class Storm:
    """An engine with so many steps in flight at most, and one reader."""

    def __init__(self, ledger_class: type[BlockLedger], depth: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._depth = depth
        self._random = random.Random(seed)
        self._reader_random = random.Random(seed)
        self._pool = BlockPool(NUM_BLOCKS, True, BLOCK_SIZE)
        self._ledger = ledger_class(self._pool)
        self._memory = memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
        self._forwards: queue.SimpleQueue[tuple[Work, threading.Event] | None]
        self._forwards = queue.SimpleQueue()
        self._last_prompt = 0
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []

    def run(self, duration_s: float, enough_wrong: int) -> dict[str, int]:
        """What the reader got, by count; ends early if enough of it was wrong."""
        threads = [
            threading.Thread(target=self._guarded, args=(target,))
            for target in (self._engine, self._device)
        ]
        for thread in threads:
            thread.start()
        try:
            deadline_s = time.monotonic() + duration_s
            while time.monotonic() < deadline_s and not self._failures:
                if self.counts["wrong"] >= enough_wrong:
                    break
                self._read()
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()
        if self._failures:
            raise self._failures[0]
        return dict(self.counts) | vars(self._ledger.counters)

    def _guarded(self, target) -> None:
        try:
            target()
        except BaseException as error:
            self._failures.append(error)

    def _engine(self) -> None:
        in_flight: deque[tuple[threading.Event, list[list[KVCacheBlock]]]] = deque()
        while not self._stopping.is_set():
            work, requests = self._schedule()
            self._ledger.begin_step()
            ended = threading.Event()
            self._forwards.put((work, ended))
            in_flight.append((ended, requests))
            if len(in_flight) == self._depth:
                self._update(*in_flight.popleft())
            if self._random.random() < 0.01:
                while in_flight:
                    self._update(*in_flight.popleft())
                assert self._pool.reset_prefix_cache()
                self.counts["resets"] += 1
        while in_flight:
            self._update(*in_flight.popleft())
        self._forwards.put(None)

    def _schedule(self) -> tuple[Work, list[list[KVCacheBlock]]]:
        work: Work = []
        requests = []
        for _ in range(REQUESTS_A_STEP):
            self._last_prompt = self._random.randrange(NUM_PROMPTS)
            hashes = PROMPTS[self._last_prompt]
            blocks: list[KVCacheBlock] = []
            for block_hash in hashes:
                cached = self._pool.get_cached_block(block_hash, [0])
                if cached is None:
                    break
                blocks += cached
            self._pool.touch(blocks)
            num_cached = len(blocks)
            blocks += self._pool.get_new_blocks(len(hashes) - num_cached)
            request = SimpleNamespace(block_hashes=hashes)
            self._pool.cache_full_blocks(
                request, blocks, num_cached, len(hashes), BLOCK_SIZE, 0
            )
            work += [
                (block.block_id, block_hash)
                for block, block_hash in zip(blocks, hashes, strict=True)
            ][num_cached:]
            requests.append(blocks)
        return work, requests

    def _update(
        self, ended: threading.Event, requests: list[list[KVCacheBlock]]
    ) -> None:
        ended.wait()
        for blocks in requests:
            self._pool.free_blocks(reversed(blocks))
        self._ledger.finish_step()
        self.counts["steps"] += 1

    def _device(self) -> None:
        while (forward := self._forwards.get()) is not None:
            work, ended = forward
            writes = [(*block, piece) for block in work for piece in range(PIECES)]
            for block_id, block_hash, piece in writes:
                place = self._piece(block_id, piece)
                self._memory[place] = true_bytes(block_hash)[: BLOCK_BYTES // PIECES]
                time.sleep(FORWARD_S / len(writes))
            ended.set()

    def _read(self) -> None:
        """One offer, read and validated, of a prompt that may be under way."""
        prompt = self._last_prompt
        if self._reader_random.random() < 0.5:
            prompt = self._reader_random.randrange(NUM_PROMPTS)
        offer = self._ledger.lookup(PROMPTS[prompt])
        if not offer.block_ids:
            time.sleep(1e-4)
            return
        pause_s = self._reader_random.choice(READ_PAUSES_S)
        read = []
        for block_id in offer.block_ids:
            pieces = []
            for piece in range(PIECES):
                pieces.append(bytes(self._memory[self._piece(block_id, piece)]))
                time.sleep(pause_s)
            read.append(b"".join(pieces))
        num_valid = self._ledger.validate(offer.token)
        for block_hash, data in zip(PROMPTS[prompt][:num_valid], read, strict=False):
            self.counts["accepted"] += 1
            self.counts["wrong"] += data != true_bytes(block_hash)

    @staticmethod
    def _piece(block_id: int, piece: int) -> slice:
        size = BLOCK_BYTES // PIECES
        start = block_id * BLOCK_BYTES + piece * size
        return slice(start, start + size)


PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"
# One step at a time, and two in flight as under async scheduling.
DEPTHS = [1, 2]
CONTROLS = ["without exclusion", "without validation"]
DURATION_S = 20.0
ENOUGH_WRONG = 20


@pytest.fixture(autouse=True)
def threads_take_turns_all_the_time():
    """Also within a lookup."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def storm(ledger: str, depth: int) -> dict[str, int]:
    return Storm(LEDGERS[ledger], depth, seed=depth).run(DURATION_S, ENOUGH_WRONG)


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_wrong_byte_is_accepted(depth):
    counts = storm("as it is", depth)
    assert counts["wrong"] == 0, counts
    # What makes it hard was there.
    assert counts["accepted"] > 1_000, counts
    assert counts["blocks_evicted"] > 100, counts
    assert counts["stopped_in_flight"] > 100, counts
    assert counts["resets"] > 0, counts


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ledger", CONTROLS)
def test_without_a_safeguard_wrong_bytes_are_accepted(ledger, depth):
    counts = storm(ledger, depth)
    assert counts["wrong"] >= ENOUGH_WRONG, counts
