# SPDX-License-Identifier: Apache-2.0
"""The places of sessions in flight: who arrives while all are taken waits."""

from __future__ import annotations

import asyncio


class Slots:
    """At most `limit` sessions at a time; None is any number.

    `held` sessions had to wait for a slot, the longest for `held_ns_max`.
    """

    def __init__(self, limit: int | None) -> None:
        self.held = 0
        self.held_ns_max = 0
        self._limited = limit is not None
        # When each slot that is free became so.
        self._free_ns: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(limit or 0):
            self._free_ns.put_nowait(0)

    async def take(self, arrived_ns: int) -> int:
        """Wait for a slot; when the session is due: `arrived_ns`, or later."""
        if not self._limited:
            return arrived_ns
        due_ns = max(arrived_ns, await self._free_ns.get())
        if due_ns > arrived_ns:
            self.held += 1
            self.held_ns_max = max(self.held_ns_max, due_ns - arrived_ns)
        return due_ns

    def leave(self, ended_ns: int) -> None:
        """The session that ended then gives its slot back."""
        self._free_ns.put_nowait(ended_ns)
