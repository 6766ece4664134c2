# SPDX-License-Identifier: Apache-2.0
"""Where replayers that share the sessions of a trace wait to begin at one moment.

A gate is a folder. The replayer puts `ready` into it once it can begin, and somebody
puts `start` into it, with the time of CLOCK_MONOTONIC at which it shall, in ns.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from lab.records.documents import write_whole

LOOK_EVERY_S = 0.01


class Gate:
    """The gate in `folder`, which is there."""

    def __init__(self, folder: Path) -> None:
        self._ready, self._start = folder / "ready", folder / "start"

    @property
    def ready(self) -> bool:
        return self._ready.exists()

    def open(self, start_ns: int) -> None:
        write_whole(self._start, str(start_ns).encode())

    def remove(self) -> None:
        """Once nobody waits there any more."""
        self._ready.unlink()
        self._start.unlink()

    async def start_ns(self) -> int:
        """The replayer's side: say that it is ready, and wait for the start."""
        self._ready.touch()
        while not self._start.exists():
            await asyncio.sleep(LOOK_EVERY_S)
        return int(self._start.read_text())
