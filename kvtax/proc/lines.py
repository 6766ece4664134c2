# SPDX-License-Identifier: Apache-2.0
"""Lines that a process is told through a named pipe."""

from __future__ import annotations

import os
from pathlib import Path

PIPE_BYTES = 65_536


class Lines:
    """The lines that come through the pipe at `path`; waits until somebody writes it.

    Can be waited for, as a file can. `open` is False once none can come any more.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._rest = b""
        self.open = True

    def fileno(self) -> int:
        return self._fd

    def come(self) -> list[bytes]:
        """Read the whole lines that are there by now; wait if there are none."""
        told = os.read(self._fd, PIPE_BYTES)
        self.open = bool(told)
        *lines, self._rest = (self._rest + told).split(b"\n")
        return lines
