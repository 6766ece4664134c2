# SPDX-License-Identifier: Apache-2.0
"""JSON lines: a header that names the schema, then one record per line.

A writer that is killed leaves at most one torn last line. A reader drops it and counts
it. A bad line anywhere else means that the file is not what it claims to be.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from lab.records import RecordsError
from lab.records.schema import decode

Header = TypeVar("Header", bound=msgspec.Struct)


@dataclass(frozen=True)
class Lines(Generic[Header]):
    """What a file of JSON lines holds.

    `header` is None if the writer was killed before it had written one.
    """

    header: Header | None
    records: list[Any]
    torn_lines: int


def read_lines(
    path: Path, header_kind: type[Header], record_kind: Any, limit: int | None = None
) -> Lines[Header]:
    """The header of `path` and its records, not more than the first `limit`.

    `record_kind` is a struct, or a union of tagged ones. Raises RecordsError if the
    file is missing or of another schema, and names file and line if a line is bad.
    """
    header, records = None, []
    torn: RecordsError | None = None
    decode_record = msgspec.json.Decoder(record_kind).decode
    try:
        with path.open("rb") as file:
            stop = None if limit is None else limit + 1
            for number, line in enumerate(itertools.islice(file, stop), start=1):
                if torn is not None:
                    raise torn
                try:
                    if not line.endswith(b"\n"):
                        raise msgspec.DecodeError("the line is cut off")
                    if number == 1:
                        header = decode(path, line, header_kind)
                    else:
                        records.append(decode_record(line))
                except msgspec.DecodeError as error:
                    torn = RecordsError(f"{path}:{number}: bad record: {error}")
                    if not is_torn(line):
                        raise torn from None
    except FileNotFoundError:
        raise RecordsError(f"{path}: missing") from None
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None
    return Lines(header, records, int(torn is not None))


def read_header(path: Path, header_kind: type[Header]) -> Header:
    """The header of `path`; RecordsError if it has none, or one of another schema."""
    header = read_lines(path, header_kind, msgspec.Raw, limit=0).header
    if header is None:
        raise RecordsError(f"{path}:1: no header line")
    return header


def is_torn(line: bytes) -> bool:
    """Whether a last line may be what a killed writer left: cut off, or no JSON."""
    if not line.endswith(b"\n"):
        return True
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return True
    return False
