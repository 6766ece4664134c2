# SPDX-License-Identifier: Apache-2.0
"""The lines of a trace file, plain or gzip, one at a time; errors say where."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from os import PathLike
from typing import TypeVar

import msgspec

from fleet.trace.request import TraceError

GZIP_MAGIC = b"\x1f\x8b"

T = TypeVar("T")


class Lines:
    """Iterates over the lines of a file; `number` is that of the last one, from 1."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = path
        self.number = 0

    def __iter__(self) -> Iterator[bytes]:
        """The lines.

        Raises:
            TraceError: the file cannot be read, or is torn.
        """
        self.number = 0
        try:
            with open(self.path, "rb") as file:
                packed = file.peek(2)[:2] == GZIP_MAGIC
                with gzip.open(file) if packed else file as text:
                    for line in text:
                        self.number += 1
                        yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.number += 1
            raise self.error(f"torn gzip data ({error}): fetch it again") from None
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from None

    def decode(self, decoder: msgspec.json.Decoder[T], line: bytes) -> T:
        """A line as the decoder's type.

        Raises:
            TraceError: the line is not of that type.
        """
        try:
            return decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not line.endswith(b"\n"):
                raise self.error(
                    f"the file ends within the line ({error}): it is torn, fetch or "
                    "make it again"
                ) from None
            raise self.error(f"{error}: mend or remove the line") from None

    def error(self, what: str) -> TraceError:
        """An error at the last line."""
        return TraceError(f"{self.path}, line {self.number}: {what}")
