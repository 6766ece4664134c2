# SPDX-License-Identifier: Apache-2.0
"""Count the blocks that a prefix cache could reuse, a batch of requests at a time.

A prefix cache can reuse a block only if all blocks before it were seen with it. So a
block is identified by a key of the whole prefix that it ends, and traces whose ids name
the content of one block alone are counted right as well. Keys are 64-bit hashes: of
3,700 traces with a hundred million prefixes, one has two equal keys by chance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtax_fleet.trace.request import Request

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: NDArray[Any]) -> NDArray[Any]:
    """Compute SplitMix64's output for states x (uint64): one to one, spread evenly.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prefix_keys(ids: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Compute the key of the prefix that ends in each block, uint64.

    `ids` (uint64) are the blocks of several prompts in a row, `lengths` how many each
    has. A key is the sum of what its blocks hash to at their places.
    """
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.arange(len(ids)) - starts
    sums = np.cumsum(mix(ids ^ mix(places.astype(np.uint64))), dtype=np.uint64)
    before = np.concatenate([np.zeros(1, np.uint64), sums])[starts]
    return mix(sums - before)


class OwnerTable:
    """Keys, and the first owner of each.

    An open-addressing hash table in two arrays: 12 bytes per slot, at most three
    quarters of the slots taken.
    """

    def __init__(self) -> None:
        self._allocate(1 << 16)
        self.size = 0

    def _allocate(self, slots: int) -> None:
        self._keys = np.zeros(slots, np.uint64)  # 0: free
        self._owners = np.empty(slots, np.int32)

    def claim(self, keys: NDArray[Any], owners: NDArray[Any]) -> NDArray[Any]:
        """Return each key's owner so far, -1 if none.

        Keys without an owner then belong to theirs in `owners` (int32).
        """
        keys = np.where(keys == 0, np.uint64(1), keys)
        while self.size + len(keys) > len(self._keys) * 3 // 4:
            self._grow()
        return self._claim(keys, owners)

    def _claim(self, keys: NDArray[Any], owners: NDArray[Any]) -> NDArray[Any]:
        result = np.full(len(keys), -1, np.int32)
        mask = np.uint64(len(self._keys) - 1)
        todo = np.arange(len(keys))
        slots = keys & mask
        while todo.size:
            free = np.flatnonzero(self._keys[slots] == 0)
            claimed = slots[free]
            # Of several claims to a slot numpy keeps the last written: the first made.
            self._owners[claimed[::-1]] = free[::-1]
            won = free[self._owners[claimed] == free]
            self._keys[slots[won]] = keys[todo[won]]
            self._owners[slots[won]] = owners[todo[won]]
            self.size += len(won)
            found = self._keys[slots] == keys[todo]
            result[todo[found]] = self._owners[slots[found]]
            result[todo[won]] = -1
            todo, slots = todo[~found], (slots[~found] + np.uint64(1)) & mask
        return result

    def _grow(self) -> None:
        taken = self._keys != 0
        keys, owners = self._keys[taken], self._owners[taken]
        self._allocate(len(self._keys) * 2)
        self.size = 0
        for begin in range(0, len(keys), 1 << 16):
            part = slice(begin, begin + (1 << 16))
            self._claim(keys[part], owners[part])


# Big enough that numpy's calls cost nothing, small enough for the processor's cache.
BATCH_BLOCKS = 1 << 17
BATCH_REQUESTS = 1 << 14


class Batch(NamedTuple):
    """Requests in order of arrival."""

    requests: list[Request]
    lengths: NDArray[Any]  # blocks of each, int64
    ids: NDArray[Any]  # blocks of all of them in a row, uint64


def batches(requests: Iterable[Request]) -> Iterator[Batch]:
    """Cut a trace into batches."""
    taken: list[Request] = []
    ids: list[int] = []
    for request in requests:
        taken.append(request)
        ids += request.hashes
        if len(ids) >= BATCH_BLOCKS or len(taken) >= BATCH_REQUESTS:
            yield _batch(taken, ids)
            taken, ids = [], []
    if taken:
        yield _batch(taken, ids)


def _batch(requests: list[Request], ids: list[int]) -> Batch:
    lengths = np.array([len(request.hashes) for request in requests])
    return Batch(requests, lengths, np.array(ids, np.uint64))


class SessionNumbers:
    """Numbers of sessions: their first request's place in the trace."""

    def __init__(self) -> None:
        self._table = OwnerTable()
        self._requests = 0

    def of(self, names: list[str]) -> NDArray[Any]:
        """Return the session numbers of the next requests, int32."""
        own = np.arange(self._requests, self._requests + len(names), dtype=np.int32)
        self._requests += len(names)
        first = self._table.claim(session_keys(names), own)
        return np.where(first < 0, own, first)


def session_keys(names: list[str]) -> NDArray[Any]:
    """Hash names to 64 bits, the same in every process, uint64."""
    digests = (blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), "<u8")


class Reuse:
    """Counter of blocks seen before with all that precede them.

    `intra_session` are those that an earlier turn of the same session had,
    `cross_session` those that only other sessions had; together they are what a cache
    that forgets nothing hits. Memory: 16 to 32 bytes per distinct prefix, 12 to 24 per
    request.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.intra_session = 0
        self.cross_session = 0
        self._firsts = OwnerTable()  # the session that had a prefix first
        self._others = OwnerTable()  # (prefix, session) where that is another one
        # By session, its last prompt: how many blocks, and the key of all of them.
        self._last_lengths: NDArray[Any] = np.zeros(1 << 16, np.int32)
        self._last_keys: NDArray[Any] = np.zeros(1 << 16, np.uint64)

    @property
    def distinct(self) -> int:
        """Different prefixes: the size of a cache that forgets nothing."""
        return self._firsts.size

    def add(
        self, keys: NDArray[Any], lengths: NDArray[Any], sessions: NDArray[Any]
    ) -> None:
        """Count prompts: keys of their prefixes, how many each has, their sessions."""
        known = self._as_before(keys, lengths, sessions)
        starts = np.cumsum(lengths) - lengths
        new = np.arange(len(keys)) >= np.repeat(starts + known, lengths)
        keys, owners = keys[new], np.repeat(sessions, lengths - known)

        firsts = self._firsts.claim(keys, owners)
        own = firsts == owners
        cross = (firsts >= 0) & ~own
        pairs = mix(keys[cross] ^ mix(owners[cross].astype(np.uint64)))
        again = self._others.claim(pairs, owners[cross]) >= 0
        self.blocks += int(lengths.sum())
        self.intra_session += int(known.sum() + own.sum() + again.sum())
        self.cross_session += int(len(pairs) - again.sum())

    def _as_before(
        self, keys: NDArray[Any], lengths: NDArray[Any], sessions: NDArray[Any]
    ) -> NDArray[Any]:
        """Count the leading blocks that are the whole prompt of the turn before, or 0.

        Most blocks of agentic sessions are, and need no look into the tables.
        """
        if not len(keys):
            return np.zeros_like(lengths)
        while sessions.max() >= len(self._last_lengths):
            self._last_lengths = np.append(self._last_lengths, 0 * self._last_lengths)
            self._last_keys = np.append(self._last_keys, 0 * self._last_keys)
        ends = np.cumsum(lengths)
        # A prompt without blocks has no key; the one taken here is never looked at.
        whole = keys[np.maximum(ends, 1) - 1]
        last_lengths = self._last_lengths[sessions]
        last_keys = self._last_keys[sessions]
        order = np.argsort(sessions, kind="stable")
        before, after = order[:-1], order[1:]
        same = sessions[before] == sessions[after]
        last_lengths[after[same]] = lengths[before[same]]
        last_keys[after[same]] = whole[before[same]]
        # Of several turns of a session numpy keeps the last written.
        self._last_lengths[sessions], self._last_keys[sessions] = lengths, whole

        grown = (last_lengths > 0) & (last_lengths <= lengths)
        places = np.where(grown, ends - lengths + last_lengths, 1) - 1
        return np.where(grown & (keys[places] == last_keys), last_lengths, 0)


class LruCache:
    """Exact LRU over blocks; memory: 8 bytes per block and 500 per run."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.hits = 0
        self._size = 0
        self._runs: OrderedDict[int, NDArray[Any]] = OrderedDict()  # by time of use
        self._times: dict[int, int] = {}  # of runs, by their first key
        self._now = 0

    def add(self, keys: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Look prompts up one after the other, and cache them.

        A prompt longer than the cache leaves its head there.
        """
        end = 0
        for length in lengths.tolist():
            begin, end = end, end + length
            if length:
                self._use(keys[begin:end].copy())

    def _use(self, prompt: NDArray[Any]) -> None:
        hit = self._take(prompt)
        self.hits += hit
        self._size += len(prompt) - hit
        self._now += 1
        self._runs[self._now] = prompt
        self._times[int(prompt[0])] = self._now
        while self._size > self.blocks:
            self._evict()

    def _take(self, prompt: NDArray[Any]) -> int:
        """Remove a prompt's head from the runs that have it; returns how much."""
        taken = 0
        while taken < len(prompt):
            time = self._times.pop(int(prompt[taken]), None)
            if time is None:
                break
            run = self._runs[time]
            n = min(len(run), len(prompt) - taken)
            differ = run[:n] != prompt[taken : taken + n]
            equal = int(differ.argmax()) if differ.any() else n
            taken += equal
            if equal == len(run):
                del self._runs[time]
            else:
                self._runs[time] = run[equal:].copy()
                self._times[int(run[equal])] = time
        return taken

    def _evict(self) -> None:
        """Shorten the run that was used the longest time ago."""
        time, run = next(iter(self._runs.items()))
        keep = max(0, len(run) - (self._size - self.blocks))
        self._size -= len(run) - keep
        if keep:
            self._runs[time] = run[:keep]
        else:
            del self._runs[time]
            del self._times[int(run[0])]
