# SPDX-License-Identifier: Apache-2.0
"""Trace files: JSON lines, plain or packed, and our own format.

jsonlines reads and writes them, with msgspec for each line. The format kvtax.trace/1 is
a header line, then one request per line. Errors name file and line.
"""

from __future__ import annotations

import gzip
import itertools
import lzma
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import jsonlines
import msgspec
from kvtax.records.files import replacing

from kvtax_fleet.trace.request import Count, Request, TraceError

SCHEMA = "kvtax.trace/1"


class Header(msgspec.Struct):
    """The part of the header that a reader needs; the rest is provenance."""

    schema: str
    requests: Count | None = None  # how many follow


_HEADER = msgspec.json.Decoder(Header)
_REQUEST = msgspec.json.Decoder(Request)


def read(lines: Lines) -> Iterator[Request]:
    """Yield the requests of a trace in our own format.

    Raises TraceError: another schema, a bad line, a turn out of order, or another
    number of requests than in the header.
    """
    header = next(lines.read(_HEADER))
    if header.schema != SCHEMA:
        raise lines.error(f"schema is {header.schema!r}; only {SCHEMA!r} is known")
    count = 0
    turns: dict[str, int] = {}  # each session's next one
    for request in lines.read(_REQUEST):
        turn = turns.get(request.session, 0)
        if request.turn != turn:
            raise lines.error(
                f"turn {request.turn} of session {request.session!r} where turn {turn} "
                "should be: a session is there as a whole and in order"
            )
        turns[request.session] = turn + 1
        yield request
        count += 1
    if header.requests not in (None, count):
        raise lines.error(
            f"the file ends after {count} requests, its header says "
            f"{header.requests}: it is torn, make it again"
        )


def write_trace(
    path: str | os.PathLike[str], header: dict[str, Any], requests: Iterable[Request]
) -> None:
    """Write a trace, packed if its name ends in .gz or .xz; all of it or nothing.

    `header["requests"]` says how many there will be.

    Raises TraceError: the count is another, or the file cannot be written.
    """
    count = 0
    with _whole_file(Path(path)) as file:
        dumps = msgspec.json.Encoder().encode
        writer = jsonlines.Writer(cast(BinaryIO, file), dumps=dumps)
        writer.write({"schema": SCHEMA} | header)
        for request in requests:
            writer.write(request)
            count += 1
        if count != header["requests"]:
            raise TraceError(
                f"{path}: {count} requests came, {header['requests']} were counted "
                "before: the source changed in between, run it again"
            )


@contextmanager
def _whole_file(path: Path) -> Iterator[BufferedIOBase | BinaryIO]:
    """Open a file that gets its name when it is complete and on disk."""
    try:
        with replacing(path) as name, open(name, "wb", buffering=1 << 20) as file:
            if path.suffix == ".gz":
                # Equal traces are equal bytes: no time, no name; level 1 is 4 times
                # as fast as 9 and 15 % bigger.
                with gzip.GzipFile("", "wb", 1, file, mtime=0) as zipped:
                    yield zipped
            elif path.suffix == ".xz":
                with lzma.LZMAFile(file, "wb") as packed:
                    yield packed
            else:
                yield file
            file.flush()
            if name != path:
                os.fsync(file.fileno())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def require_file(path: str | PathLike[str]) -> None:
    """Raise TraceError for a pipe, of a path that is read more than once."""
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise TraceError(
            f"{path}: a pipe, which can be read only once: write it to a file, which "
            "is read several times here"
        )


# Bytes of a line above which it is no request: a few MB of gzip may hold gigabytes.
LONGEST_LINE = 64 << 20
# First bytes of packed files, and of others that are no JSON lines.
GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ"
UTF_16 = "text in UTF-16: write it in UTF-8 (iconv -f UTF-16 -t UTF-8)"
FOREIGN = {
    GZIP: "packed twice: unpack it once",
    XZ: "packed twice: unpack it once",
    b"version https://git-lfs": "a pointer of Git LFS: fetch the file (git lfs pull)",
    b"\x28\xb5\x2f\xfd": "packed with zstd: unpack it (zstd -d)",
    b"\x04\x22\x4d\x18": "packed with lz4: unpack it (lz4 -d)",
    b"BZh": "packed with bzip2: unpack it (bzip2 -d)",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "Parquet: write its rows as JSON lines",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"{\0": UTF_16,
    b"\0{": UTF_16,
}

# What msgspec says of JSON that ends early.
TRUNCATED = "Input data was truncated"

T = TypeVar("T")


class Lines:
    """JSON lines of a file; `number` is that of the last line read, from 1."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = path
        self.number = 0
        self._line = b""
        self._unread = iter(self)

    def __iter__(self) -> Iterator[bytes]:
        """Yield all lines.

        Raises TraceError: the file cannot be read, or is torn.
        """
        self.number = 0
        try:
            with open(self.path, "rb") as file, _unpacked(file) as text:
                for line in iter(lambda: text.readline(LONGEST_LINE), b""):
                    self.number += 1
                    self._line = line
                    if len(line) == LONGEST_LINE:
                        raise self.error(
                            f"over {LONGEST_LINE >> 20} MB, as no request is: mend or "
                            "remove the line"
                        )
                    yield line
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
            self.number += 1
            raise self.error(
                f"the packed data is incomplete or damaged ({error}): copy the file "
                "again"
            ) from None
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}") from None

    def first(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode the first line, which stays unread.

        Raises TraceError: the file is empty, or the line is not of that type.
        """
        first = list(itertools.islice(self._unread, 1))
        self._unread = itertools.chain(first, self._unread)
        return next(self._decoded(first, decoder))

    def read(self, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
        """Decode the unread lines.

        Raises TraceError: the file is empty, or a line is not of that type.
        """
        return self._decoded(self._unread, decoder)

    def _decoded(
        self, lines: Iterable[bytes], decoder: msgspec.json.Decoder[T]
    ) -> Iterator[T]:
        reader = jsonlines.Reader(lines, loads=decoder.decode)
        while True:
            try:
                value: Any = reader.read()
            except EOFError:
                break
            except (jsonlines.InvalidLineError, RecursionError) as error:
                self._refuse_foreign()
                raise self.error(self._problem(error)) from None
            else:
                yield value
        if not self.number:
            raise TraceError(
                f"{self.path}: the file is empty: a trace has at least one line"
            )

    def _refuse_foreign(self) -> None:
        """Raise TraceError if the first line shows that the file is of another kind."""
        if self.number != 1:
            return
        for begin, kind in FOREIGN.items():
            if self._line.startswith(begin):
                raise self.error(f"no JSON lines, but {kind}")

    def _problem(self, error: Exception) -> str:
        """Explain why the last line cannot be decoded, with the remedy."""
        line = self._line.removeprefix(BOM_UTF8).strip()
        why = error.__cause__ or error
        if line.startswith(b"["):
            return (
                "a JSON array, where each line is an object: make one line of each "
                "element (jq -c '.[]' FILE)"
            )
        if not line:
            return "the line is blank: remove it"
        # Another type than wanted is no sign that something is missing.
        if isinstance(why, msgspec.ValidationError):
            return f"{why}: mend or remove the line"
        if not line.startswith(b"{"):
            return (
                "no object in JSON, as in CSV or another text: make one object of each "
                "request, with the fields of one format, or remove the line"
            )
        if not self._line.endswith(b"\n"):
            return (
                f"the file ends within the line ({why}): it is torn, fetch or make it "
                "again"
            )
        if str(why) == TRUNCATED and not line.endswith(b"}"):
            return (
                "the object does not end in its line: put each into one line "
                "(jq -c . FILE), or mend or remove the line"
            )
        return f"{why}: mend or remove the line"

    def error(self, problem: str) -> TraceError:
        """Make an error at the last line."""
        return TraceError(f"{self.path}, line {self.number}: {problem}")


def _unpacked(file: BufferedReader) -> BufferedIOBase:
    head = file.peek(len(XZ))
    if head.startswith(GZIP):
        return gzip.GzipFile(fileobj=file)
    return lzma.LZMAFile(file) if head.startswith(XZ) else file
