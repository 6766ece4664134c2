# SPDX-License-Identifier: Apache-2.0
"""Which prefixes were seen before: keys of prefixes, and a table of their owners.

A block counts as seen only if all that precede it were seen with it: that is what a
prefix cache can use. So blocks are told apart by a key of the whole prefix that they
end, and traces whose ids name the content of one block alone are counted right as well.

Keys are 64-bit hashes: of 3,700 traces with a hundred million prefixes, one has two
equal keys by chance.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output for states x (uint64): one to one, and spread evenly.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prefix_keys(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Keys of the prefixes that end in each block, uint64.

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

    def claim(self, keys: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """For each key in turn its first owner before this one came, or -1 if none.

        Keys without an owner then belong to theirs in `owners` (int32).
        """
        keys = np.where(keys == 0, np.uint64(1), keys)
        while self.size + len(keys) > len(self._keys) * 3 // 4:
            self._grow()
        return self._claim(keys, owners)

    def _claim(self, keys: np.ndarray, owners: np.ndarray) -> np.ndarray:
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
