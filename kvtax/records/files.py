# SPDX-License-Identifier: Apache-2.0
"""Files of a run: JSON documents, and JSON lines with a header.

The schema of a file is the tag of the struct that is its document or its header. A
document is written whole or not at all. A writer of lines that is killed leaves at most
one torn last line; a reader drops it and counts it. A bad line anywhere else means that
the file is not what it claims to be.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from codecs import BOM_UTF8
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from stat import S_ISFIFO, S_ISLNK
from typing import Any, BinaryIO, Generic, Self, TypeVar

import msgspec

from kvtax.records import RecordsError
from kvtax.records.parts import LONGEST_LINE, existing, lines_of, opened

Kind = TypeVar("Kind", bound=msgspec.Struct)


class _Named(msgspec.Struct):
    schema: str | None = None


def schema_of(kind: type[msgspec.Struct]) -> str:
    """Return the schema that `kind` declares: kvtax.<name>/<version>."""
    return str(kind.__struct_config__.tag)


def decode(path: Path, text: bytes, kind: type[Kind]) -> Kind:
    """Decode `text` as a `kind`.

    Raises RecordsError naming both schemas if it is of another one, and
    msgspec.DecodeError if it is no JSON or a field is wrong.
    """
    try:
        schema = msgspec.json.decode(text, type=_Named).schema
        if schema != schema_of(kind):
            raise RecordsError(
                f"{path}: schema is {schema!r}, this reader needs {schema_of(kind)!r}; "
                "use the kvtax version that wrote the run"
            )
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise RecordsError(f"{path}: the JSON is nested too deeply") from None


def read_document(path: Path, kind: type[Kind]) -> Kind:
    """Read `kind` from `path`, or from what gzip made of that file.

    Raises RecordsError if it is missing, bad or of another schema.
    """
    with _named_errors(path):
        return decode(path, _whole(path), kind)


def schema_in(path: Path) -> str | None:
    """Return the schema that a document says it is of. Raises RecordsError."""
    with _named_errors(path):
        return msgspec.json.decode(_whole(path), type=_Named).schema


def _whole(path: Path) -> bytes:
    """Read a document, or what gzip made of it. Raises RecordsError if it is huge."""
    with opened(existing(path) or path) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise RecordsError(f"{path}: over {MOST_BYTES >> 20} MB of JSON")
    return text


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Raise RecordsError, which names `path`, for a document that is missing or bad."""
    try:
        yield
    except RecursionError:
        raise RecordsError(f"{path}: the JSON is nested too deeply") from None
    except FileNotFoundError:
        raise RecordsError(f"{path}: missing") from None
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordsError(f"{path}: {error}") from None


def write_document(path: Path, document: msgspec.Struct | dict[str, Any]) -> None:
    """Write `document` as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write `path`, so that a killed writer leaves the old file, or none."""
    with written_whole(path) as file:
        file.write(content)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` once it is complete.

    It follows no link of another user: a folder of somebody else's could have one that
    leads to a file of ours. Raises OSError, which names `path`.
    """
    with replacing(path) as partial:
        if partial == path:  # a pipe or a device
            with partial.open("wb") as file:
                yield file
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(partial, flags, 0o666), "wb") as file:
            yield file


def _is_foreign(path: Path) -> bool:
    """Decide whether `path` is a link or pipe that neither the caller nor root made."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        is_own = status.st_uid in (0, os.geteuid())
        return not is_own and (S_ISLNK(status.st_mode) or S_ISFIFO(status.st_mode))
    return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a file that takes the place of `path` once it is complete.

    What is no file, a pipe or a device, is written to itself. Raises OSError, which
    names `path`; then the old file is still there, and nothing else.
    """
    try:
        if _is_foreign(path):
            why = "is a link or a pipe that another user made"
            raise OSError(errno.ELOOP, why, str(path))
        if path.exists() and not path.is_file():
            yield path
            return
        path = path.resolve()
        # A name that nobody can have put there before.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


Header = TypeVar("Header", bound=msgspec.Struct)


@dataclass(frozen=True)
class Lines(Generic[Header]):
    """Content of a file of JSON lines.

    `bad` names the lines that are left out.
    """

    header: Header
    records: list[Any]
    torn_lines: int
    bad: list[str]


def read_lines(
    path: Path,
    header_kind: type[Header],
    record_kind: Any,
    limit: int | None = None,
    strict: bool = True,
    step: int = 1,
) -> Lines[Header]:
    """Read the header of `path` and every `step`-th record, at most `limit`.

    `record_kind` is a struct, or a union of tagged ones. Raises RecordsError if the
    file is missing, without a header or of another schema, and names file and line if a
    line is bad. If not `strict`, bad lines are left out instead.
    """
    header, records = None, []
    bad: list[str] = []
    torn: RecordsError | None = None
    decode_record = msgspec.json.Decoder(record_kind).decode
    try:
        with opened(path) as file:
            for number, line in enumerate(lines_of(file), start=1):
                if header is not None and len(records) == limit:
                    break
                if number % step and number > 1 and torn is None and line[-1:] == b"\n":
                    continue
                if torn is not None:
                    if strict:
                        raise torn
                    bad.append(str(torn))
                    torn = None
                try:
                    if not line.endswith(b"\n"):
                        is_long = len(line) == LONGEST_LINE
                        why = (
                            f"is over {LONGEST_LINE >> 20} MB"
                            if is_long
                            else "is cut off"
                        )
                        raise msgspec.DecodeError(f"the line {why}")
                    if number == 1:
                        # Editors of Windows begin a file with a byte order mark.
                        header = decode(path, line.removeprefix(BOM_UTF8), header_kind)
                    elif number % step == 0:
                        records.append(decode_record(line))
                except (
                    msgspec.DecodeError,
                    UnicodeDecodeError,
                    RecursionError,
                ) as error:
                    wrong = RecordsError(f"{path}:{number}: bad record: {error}")
                    if is_torn(line):
                        torn = wrong
                    elif strict:
                        raise wrong from None
                    else:
                        bad.append(str(wrong))
    except FileNotFoundError:
        raise RecordsError(f"{path}: missing") from None
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None
    if header is None:
        raise RecordsError(f"{path}:1: no header line")
    return Lines(header, records, int(torn is not None), bad)


def read_header(path: Path, header_kind: type[Header]) -> Header:
    """Read the header of `path`; RecordsError without one, or of another schema."""
    return read_lines(path, header_kind, msgspec.Raw, limit=0).header


def is_torn(line: bytes) -> bool:
    """Decide whether a last line is torn: cut off, or no JSON."""
    if not line.endswith(b"\n"):
        return True
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    except RecursionError:
        return False
    return False


FLUSH_EVERY_S = 0.25
# Size of the largest document that is read, unpacked.
MOST_BYTES = 256 << 20


class LineFile:
    """Writes `path`, which must not exist yet (FileExistsError).

    `mode`: the file's permissions. The header is written at once (OSError), the lines
    by a thread of their own, so that a slow disk delays no request. If that fails,
    `flush_forever`, the result of `flush` and the end of the context raise OSError. The
    lines of that flush are lost then, and the file ends with the last line before
    them.
    """

    def __init__(self, path: Path, header: msgspec.Struct, mode: int = 0o666) -> None:
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self._file = FileIO(path, "xb", opener=partial(os.open, mode=mode))
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
        try:
            self.flush().result()
        finally:
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
    """Write all of `data`: a full disk takes a part before it reports an error."""
    while data:
        data = data[file.write(data) :]
