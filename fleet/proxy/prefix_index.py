# SPDX-License-Identifier: Apache-2.0
"""Which instances hold which prefix: keys to sets of instances, as bit masks.

A key stands for a piece of a prompt and all that comes before it, so that looking up a
prompt's keys in order finds how deep each instance's cached prefix goes, in one walk
for all instances.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixIndex:
    """`instances` is their number; an instance is named by its place, from 0."""

    def __init__(self, instances: int) -> None:
        self._all = (1 << instances) - 1
        self._count = instances
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: int, instance: int) -> None:
        self._holders[key] = self._holders.get(key, 0) | 1 << instance

    def discard(self, key: int, instance: int) -> None:
        left = self._holders.get(key, 0) & ~(1 << instance)
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def depths(self, keys: Sequence[int]) -> list[int]:
        """For each instance, how many of the leading keys it holds."""
        holders = self._holders
        depths = [0] * self._count
        left = self._all
        for depth, key in enumerate(keys):
            still = left & holders.get(key, 0)
            if still == left:
                continue
            _mark(depths, left & ~still, depth)
            left = still
            if not left:
                return depths
        _mark(depths, left, len(keys))
        return depths


def _mark(depths: list[int], instances: int, depth: int) -> None:
    while instances:
        lowest = instances & -instances
        depths[lowest.bit_length() - 1] = depth
        instances ^= lowest
