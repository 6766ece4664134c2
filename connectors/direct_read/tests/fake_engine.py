# SPDX-License-Identifier: Apache-2.0
"""A transfer engine whose reads end late, in part, badly, or not at all."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from connectors.direct_read.reads import DONE, Region

NUM_BLOCKS = 24
BLOCK_BYTES = [3, 5]
# Where the peer's regions are, in its memory and in ours.
PEER_BASES = [0, 100]
BASES = [50, 500]
MEMORY_BYTES = 1000
PENDING, TIMED_OUT = 0, -2
# The polls of a read that does not end before the engine is released.
STUCK = 1 << 40


@dataclass
class Fate:
    """What happens to a read: it ends with the `polls`-th look at it.

    A read that cannot begin returns or raises `begins` instead.
    """

    status: int = DONE
    polls: int = 1
    begins: int | Exception | None = None


@dataclass
class Batch:
    target: int
    source: int
    length: int
    fate: Fate
    ended: bool = False


class FakeEngine:
    """Copies a byte more with each look, the last ones as the read ends.

    Like Mooncake, it reports an end once, and then gives the id to the next read.
    """

    def __init__(self, fates: list[Fate]) -> None:
        self.peer_memory = bytes(i % 251 + 1 for i in range(MEMORY_BYTES))
        self.memory = bytearray(MEMORY_BYTES)
        self.batches: list[Batch] = []
        self._by_id: dict[int, Batch] = {}
        self._fates = iter(fates)
        self.failure_told = False
        self.begun_after_failure = 0
        self.most_in_flight = 0
        # Reads whose fate is STUCK do not end before this is set.
        self.released = threading.Event()

    def batch_transfer_async_read(self, session, buffers, peer_addresses, lengths):
        assert session == "peer:1"
        fate = next(self._fates, Fate())
        self.begun_after_failure += self.failure_told
        if fate.begins is not None:
            self.failure_told = True
            if isinstance(fate.begins, Exception):
                raise fate.begins
            return fate.begins
        batch = Batch(*buffers, *peer_addresses, *lengths, fate)
        self.batches.append(batch)
        batch_id = min(set(range(1, 100)) - set(self._by_id))
        self._by_id[batch_id] = batch
        self.most_in_flight = max(self.most_in_flight, len(self._by_id))
        return batch_id

    def transfer_check_status(self, batch_id):
        batch = self._by_id[batch_id]
        fate = batch.fate
        if fate.polls == STUCK and not self.released.is_set():
            return TIMED_OUT
        fate.polls = 0 if fate.polls == STUCK else fate.polls - 1
        if fate.polls > 0:
            self._copy(batch, 1)
            return PENDING if fate.polls % 2 else TIMED_OUT
        batch.ended = True
        del self._by_id[batch_id]
        if fate.status == DONE:
            self._copy(batch, batch.length)
        else:
            # Some of its bytes have arrived all the same.
            self._copy(batch, batch.length // 2)
            self.failure_told = True
        return fate.status

    def _copy(self, batch: Batch, count: int) -> None:
        end = batch.source + count
        self.memory[batch.target : batch.target + count] = self.peer_memory[
            batch.source : end
        ]

    def assert_quiet(self) -> None:
        assert all(batch.ended for batch in self.batches)


def regions() -> list[Region]:
    return [
        Region(*region) for region in zip(BASES, PEER_BASES, BLOCK_BYTES, strict=True)
    ]


def block(memory: bytes, bases: list[int], block_id: int) -> bytes:
    return b"".join(
        bytes(memory[base + block_id * size : base + (block_id + 1) * size])
        for base, size in zip(bases, BLOCK_BYTES, strict=True)
    )
