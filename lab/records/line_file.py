# SPDX-License-Identifier: Apache-2.0
"""A file of JSON lines that grows while a run goes on.

A writer that is killed loses what it had not flushed yet, and may leave a torn last
line.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, Self

import msgspec

FLUSH_EVERY_S = 0.25


class LineFile:
    """Writes `path`, which must not exist yet (FileExistsError).

    The header is written at once (OSError), the lines by a thread of their own, so that
    a slow disk delays no request.
    `flush_forever` and the result of `flush` raise OSError if that fails. The lines of
    that flush are lost then, and the file ends with the last line before them.
    """

    def __init__(self, path: Path, header: msgspec.Struct) -> None:
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self._file = path.open("xb", buffering=0)
        try:
            _write_all(self._file, self._encode(header) + b"\n")
        except OSError:
            self._file.close()
            path.unlink()
            raise
        self._writer = ThreadPoolExecutor(1, "lines")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._writer.shutdown()
        self._file.close()

    def append(self, line: Any) -> None:
        """Add a line; it is on disk after the next flush."""
        self._lines.append(self._encode(line) + b"\n")

    def flush(self) -> Future[None]:
        """Have all lines so far handed to the kernel, in order."""
        lines, self._lines = self._lines, []
        return self._writer.submit(self._write, b"".join(lines))

    def _write(self, lines: bytes) -> None:
        before = self._file.tell()
        try:
            _write_all(self._file, lines)
        except OSError:
            # What is written later must not follow a torn line.
            self._file.seek(before)
            self._file.truncate()
            raise

    async def flush_forever(self) -> None:
        """Flush at the promised interval until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            # Cancelled before the thread has come to it, a write would never happen.
            await asyncio.shield(asyncio.wrap_future(self.flush()))


def _write_all(file: FileIO, data: bytes) -> None:
    """A full disk takes a part of the data before it says that it is full."""
    while data:
        data = data[file.write(data) :]
