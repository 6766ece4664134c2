# SPDX-License-Identifier: Apache-2.0
"""A file of records as it lies on a disk: in two parts, compressed, or both.

A writer that keeps its files small moves a full NAME.jsonl to NAME.jsonl.1. Killed in
between, it leaves the older part alone. Operators compress what is old.
"""

from __future__ import annotations

import errno
import gzip
import shutil
import tempfile
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kvtax.records import RecordsError

GZIP = b"\x1f\x8b"
ENDINGS = ("", ".gz")


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


def opened(path: Path) -> BinaryIO:
    """Open a part; a compressed one as a temporary file with its content.

    A writer that was killed leaves what can be unpacked. Raises OSError, and
    RecordsError for a compressed file that is damaged.
    """
    file = open_plain(path)
    is_packed = file.read(len(GZIP)) == GZIP
    file.seek(0)
    if not is_packed:
        return file
    with ExitStack() as stack:
        stack.enter_context(file)
        plain: Any = stack.enter_context(tempfile.TemporaryFile())
        try:
            with suppress(EOFError):
                shutil.copyfileobj(gzip.GzipFile(fileobj=file), plain)
        except (gzip.BadGzipFile, zlib.error) as error:
            raise RecordsError(f"{path}: {error}; copy the file again") from None
        plain.seek(0)
        stack.pop_all()
    file.close()
    return plain  # type: ignore[no-any-return]
