# SPDX-License-Identifier: Apache-2.0
"""The simulated prefix cache: full blocks under chained hashes, least recently used
ones evicted. Blocks in use are not pinned, unlike vLLM's.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class BlockCache:
    """At most `num_blocks` blocks of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hashes(self, tokens: np.ndarray) -> list[int]:
        """A hash for each full block of int32 tokens and all that is before it."""
        data, size = tokens.tobytes(), self.block_tokens * tokens.itemsize
        found, parent = [], 0
        for start in range(0, len(data) - size + 1, size):
            parent = hash((parent, data[start : start + size]))
            found.append(parent)
        return found

    def hit_tokens(self, hashes: list[int], prompt_tokens: int) -> int:
        """Tokens of the longest cached prefix; the last token is always computed."""
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
