# SPDX-License-Identifier: Apache-2.0
"""A prefix cache of limited size that evicts the least recently used block.

The last block of a prompt goes first, as in vLLM: what is cached of a prompt is always
its head. So blocks last used by one prompt are a *run*, a part of that prompt
without gaps: later prompts take its head away, eviction its tail. Bookkeeping by run is
exact and costs a fraction of bookkeeping by block.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class LruCache:
    """Exact LRU over blocks; memory: 8 bytes per block and 500 per run."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.hits = 0
        self._size = 0
        self._runs: OrderedDict[int, np.ndarray] = OrderedDict()  # by time of use
        self._times: dict[int, int] = {}  # of runs, by their first key
        self._now = 0

    def add(self, keys: np.ndarray, lengths: np.ndarray) -> None:
        """Look prompts up one after the other, and cache them.

        A prompt longer than the cache leaves its head there.
        """
        end = 0
        for length in lengths.tolist():
            begin, end = end, end + length
            if length:
                self._use(keys[begin:end].copy())

    def _use(self, prompt: np.ndarray) -> None:
        hit = self._take(prompt)
        self.hits += hit
        self._size += len(prompt) - hit
        self._now += 1
        self._runs[self._now] = prompt
        self._times[int(prompt[0])] = self._now
        while self._size > self.blocks:
            self._evict()

    def _take(self, prompt: np.ndarray) -> int:
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
