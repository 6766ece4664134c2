# SPDX-License-Identifier: Apache-2.0
"""A file of records as it lies on a disk: in two parts, compressed, or both.

A writer that keeps its files small moves a full NAME.jsonl to NAME.jsonl.1. Killed in
between, it leaves the older part alone. Operators compress what is old.
"""

from __future__ import annotations

import errno
import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from kvtax.records import RecordsError

GZIP = b"\x1f\x8b"
ENDINGS = ("", ".gz")
# Bytes of a line above which it is no record, but a hole in the file.
LONGEST_LINE = 16 << 20
PIECE_BYTES = 1 << 20
# Records are unpacked to some 10 to 50 times their size; what is far beyond is none.
MOST_TIMES, FEW_BYTES = 200, 64 << 20


def older_part(path: Path) -> Path:
    """Return where a writer that keeps its files small moves a full `path`."""
    return path.with_name(f"{path.name}.1")


def parts_of(path: Path) -> list[Path]:
    """Find the parts of `path`, the older first; `path` itself if there are none."""
    return [
        *filter(None, (existing(older_part(path)), existing(path))),
    ] or [path]


def whole(part: Path) -> Path:
    """Return the path of which the file is a part."""
    name = part.name.removesuffix(".gz").removesuffix(".1")
    return part.with_name(name)


def existing(path: Path) -> Path | None:
    """Find `path`, or the compressed file that took its place."""
    names = (path.parent / (path.name + ending) for ending in ENDINGS)
    return next((name for name in names if name.exists()), None)


def open_plain(path: Path) -> BinaryIO:
    """Open a file. Raises OSError, also for a pipe: its reader could wait for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.ESPIPE, "not a plain file; copy it into one", str(path))
    return path.open("rb")


class _Unpacked(io.RawIOBase):
    """Content of a compressed file as it is read. Raises RecordsError if damaged.

    A writer that was killed leaves what can be unpacked.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._content = gzip.GzipFile(fileobj=file)
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._content.read1(len(buffer))
        except EOFError:
            return 0
        except (gzip.BadGzipFile, zlib.error) as error:
            raise RecordsError(f"{self._path}: {error}; copy the file again") from None
        self._unpacked += len(content)
        if self._unpacked > max(FEW_BYTES, MOST_TIMES * self._file.tell()):
            raise RecordsError(
                f"{self._path}: is unpacked to over {MOST_TIMES} times its size, as no "
                "records are; leave the file out"
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def opened(path: Path) -> BinaryIO:
    """Open a part to be read from its beginning; a compressed one is unpacked.

    Raises OSError; reading a damaged compressed file raises RecordsError.
    """
    file = open_plain(path)
    is_packed = file.read(len(GZIP)) == GZIP
    file.seek(0)
    return io.BufferedReader(_Unpacked(path, file)) if is_packed else file


def seekable(path: Path) -> BinaryIO:
    """Open a part, a compressed one as a temporary file with its content.

    Raises OSError and RecordsError.
    """
    file = opened(path)
    if file.seekable():
        return file
    with file, ExitStack() as stack:
        try:
            plain: Any = stack.enter_context(tempfile.TemporaryFile())
        except FileNotFoundError:
            raise RecordsError(
                f"{path}: no folder to unpack it into; set TMPDIR to one that may be "
                "written"
            ) from None
        shutil.copyfileobj(file, plain, PIECE_BYTES)
        plain.seek(0)
        stack.pop_all()
    return plain  # type: ignore[no-any-return]


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of `file`; of one over LONGEST_LINE bytes its beginning alone."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            skip_line(file)
        yield line


def skip_line(file: BinaryIO) -> None:
    """Read to the end of the line, in pieces: it may be gigabytes of NULs."""
    while (piece := file.readline(PIECE_BYTES)) and not piece.endswith(b"\n"):
        pass
