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
    mixed: NDArray[Any] = x ^ (x >> np.uint64(31))
    return mixed


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


class _Distinct:
    """A growing set of keys; memory: 8 to 16 bytes for each."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)
        self._added: list[NDArray[Any]] = []

    def add(self, keys: NDArray[Any]) -> None:
        self._added.append(np.unique(keys))
        if sum(map(len, self._added)) > max(len(self._keys), BATCH_BLOCKS):
            self._merge()

    def _merge(self) -> None:
        self._keys = np.unique(np.concatenate([self._keys, *self._added]))
        self._added = []

    def __len__(self) -> int:
        self._merge()
        return len(self._keys)


class Reuse:
    """Counter of blocks seen before with all that precede them."""

    def __init__(self) -> None:
        self.blocks = 0
        self._prefixes = _Distinct()
        self._of_sessions = _Distinct()

    @property
    def distinct(self) -> int:
        """Different prefixes: the size of a cache that forgets nothing."""
        return len(self._prefixes)

    @property
    def intra_session(self) -> int:
        """Blocks that an earlier turn of the same session had."""
        return self.blocks - len(self._of_sessions)

    @property
    def cross_session(self) -> int:
        """Blocks that only other sessions had."""
        return len(self._of_sessions) - len(self._prefixes)

    def add(
        self, keys: NDArray[Any], lengths: NDArray[Any], sessions: NDArray[Any]
    ) -> None:
        """Count prompts: keys of their prefixes, how many each has, their sessions."""
        self.blocks += len(keys)
        self._prefixes.add(keys)
        owners = np.repeat(sessions.astype(np.uint64), lengths)
        self._of_sessions.add(mix(keys ^ mix(owners)))


class LruCache:
    """LRU over blocks; `hits` are the blocks that were found."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.hits = 0
        self._cached: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Look prompts up one after the other, and cache them.

        A prompt longer than the cache leaves its head there.
        """
        for prompt in np.split(keys, np.cumsum(lengths)[:-1]):
            self._use(prompt.tolist())

    def _use(self, prompt: list[int]) -> None:
        self.hits += sum(map(self._cached.__contains__, prompt))
        # The last block first: a prefix outlives what builds on it.
        for key in reversed(prompt):
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self.blocks:
            self._cached.popitem(last=False)
