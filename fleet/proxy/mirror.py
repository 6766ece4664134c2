# SPDX-License-Identifier: Apache-2.0
"""What the instances should have cached, going by what was routed to them.

A bounded LRU of prompt pieces for each instance. It counts a prompt as cached from the
moment it is routed, knows neither generated tokens nor what an instance evicts, and is
emptied when an instance is ejected.
"""

from __future__ import annotations

from collections import OrderedDict

from .prefix_index import PrefixIndex


class Mirror:
    """`capacity_tokens`: how many tokens an instance is assumed to hold."""

    def __init__(self, instances: int, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._index = PrefixIndex(instances)
        # Least recently used first; the value is the tokens in a piece.
        self._pieces = [OrderedDict[int, float]() for _ in range(instances)]
        self.tokens = [0.0] * instances

    def depths(self, keys: list[int]) -> list[int]:
        """For each instance, how many leading pieces it should have."""
        return self._index.depths(keys)

    def add(self, instance: int, keys: list[int], piece_tokens: float) -> None:
        """A prompt of these keys has been routed there."""
        pieces = self._pieces[instance]
        # The last piece first: a prefix must outlive what builds on it.
        for key in reversed(keys):
            if key in pieces:
                pieces.move_to_end(key)
            else:
                pieces[key] = piece_tokens
                self.tokens[instance] += piece_tokens
                self._index.add(key, instance)
        while self.tokens[instance] > self._capacity:
            key, tokens = pieces.popitem(last=False)
            self.tokens[instance] -= tokens
            self._index.discard(key, instance)

    def clear(self, instance: int) -> None:
        for key in self._pieces[instance]:
            self._index.discard(key, instance)
        self._pieces[instance].clear()
        self.tokens[instance] = 0.0
