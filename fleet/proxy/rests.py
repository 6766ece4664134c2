# SPDX-License-Identifier: Apache-2.0
"""Pairs of instances between which KV did not arrive: left alone for a while.

A pull that waits for KV in vain (`WAITING_FOR_REMOTE_KVS`) holds its blocks, and may do
so after it has been given up; and the request has waited for nothing. So a pair rests
after each failure, twice as long each time, until KV arrives again.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 10.0
LONGEST_S = 320.0


class Rests:
    """`now_ns` is the clock."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        # By pair: until when it rests, and for how long.
        self._rests: dict[tuple[str, str], tuple[int, float]] = {}

    def left_s(self, p: str, d: str) -> float:
        """How much longer the pair rests; 0 if it does not."""
        until_ns, _ = self._rests.get((p, d), (0, 0.0))
        return max(0.0, (until_ns - self._now_ns()) / 1e9)

    def failed(self, p: str, d: str) -> None:
        """KV did not arrive. Those that were under way together count once."""
        if self.left_s(p, d):
            return
        _, before_s = self._rests.get((p, d), (0, FIRST_S / 2))
        rest_s = min(2 * before_s, LONGEST_S)
        self._rests[p, d] = self._now_ns() + int(rest_s * 1e9), rest_s

    def worked(self, p: str, d: str) -> None:
        self._rests.pop((p, d), None)
