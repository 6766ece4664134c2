# SPDX-License-Identifier: Apache-2.0
"""The reader of step files: one file of an engine or a worker as a table.

Files may be gigabytes, so they are read in chunks of whole lines: the peak memory is
one chunk per thread, and a bad line is still found by its number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import polars as pl

from kvtax.records import RecordsError
from kvtax.records.files import Header, is_torn, read_header
from kvtax.records.parts import LONGEST_LINE, PIECE_BYTES, parts_of, seekable, skip_line
from kvtax.records.steps import (
    FIELDS,
    MOST,
    EngineHeader,
    WorkerHeader,
    another_life,
)

# Big enough to parse at full speed; two chunks in flight need little memory.
CHUNK_BYTES = 8 << 20
# Begin and end of a chunk in which methods are searched that the header lacks.
PEEK_BYTES = 64 << 10
# Fields by method, and how their columns end.
BY_METHOD = {"connector_self_us": "_us", "connector_calls": "_calls"}
Schema = dict[str, pl.DataType]


@dataclass(frozen=True)
class StepFile:
    """A step file as a table, and its number of torn lines.

    `bad` names the lines and parts that are left out.
    """

    frame: pl.DataFrame
    torn_lines: int
    bad: tuple[str, ...] = ()


Kind = type[EngineHeader] | type[WorkerHeader]


def read_steps(
    path: Path,
    header_kind: Kind,
    columns: Sequence[str],
    strict: bool = True,
) -> StepFile:
    """Read `columns` of a step file, `step_id` among them.

    A column by connector method is a struct with the methods of the header, and any
    that it lacks. The file's older part, if there is one, comes first.
    Raises RecordsError naming file and line for a bad line that is not the last. If not
    `strict`, it and what is no part of this file are left out, as long as a part is
    left.
    """
    with ExitStack() as stack:
        there: list[_Part] = []
        bad: list[RecordsError] = []
        for part in reversed(parts_of(path)):
            try:
                there.append(_open_part(stack, part, header_kind, there))
            except RecordsError as error:
                bad.append(error)
        if bad and (strict or not there):
            raise bad[0]
        methods: dict[str, None] = {}
        for one in reversed(there) if BY_METHOD.keys() & set(columns) else ():
            methods |= dict.fromkeys(one.methods())
        schema = {name: _column_type(name, list(methods)) for name in columns}
        read = [one.read(schema, strict) for one in reversed(there)]
    together = _together(read)
    together = replace(together, bad=(*map(str, bad), *together.bad))
    return together if strict else _each_once(path, together)


def _each_once(path: Path, file: StepFile) -> StepFile:
    """Leave out copies of steps, as a file has whose older part was copied, too."""
    frame = file.frame
    if not (np.diff(frame["step_id"].to_numpy()) <= 0).any():
        return file
    once = frame.unique(["step_id", "t_ns"], keep="first", maintain_order=True)
    if not (copies := frame.height - once.height):
        return file
    told = f"{path}: {copies:,} steps are in the file twice"
    return replace(file, frame=once, bad=(*file.bad, told))


def newest_header(path: Path, header_kind: type[Header]) -> Header:
    """Read the header of the newest part that has one. Raises RecordsError."""
    bad: list[RecordsError] = []
    for part in reversed(parts_of(path)):
        try:
            return read_header(part, header_kind)
        except RecordsError as error:
            bad.append(error)
    raise bad[0]


def _together(parts: Sequence[StepFile]) -> StepFile:
    return StepFile(
        frame=pl.concat([part.frame for part in parts], rechunk=False),
        torn_lines=sum(part.torn_lines for part in parts),
        bad=tuple(line for part in parts for line in part.bad),
    )


def _open_part(
    stack: ExitStack, path: Path, header_kind: Kind, newer: Sequence[_Part]
) -> _Part:
    """Open a part of the file whose `newer` part is open. Raises RecordsError."""
    header = read_header(path, header_kind)
    if newer and (why := another_life(newer[0].header, header)):
        raise RecordsError(f"{path}: {why}")
    return _Part(path, header, stack.enter_context(seekable(path)))


class _Part:
    """An open file of lines, which is parsed in chunks."""

    def __init__(
        self, path: Path, header: EngineHeader | WorkerHeader, file: BinaryIO
    ) -> None:
        self.header = header
        self._path, self._file = path, file
        self._spans, self._long, self._torn = _line_spans(file)

    def methods(self) -> list[str]:
        """List the methods of the header, and those that chunks begin or end with."""
        named = dict.fromkeys(self.header.methods)
        decode = msgspec.json.Decoder(_Methods).decode
        for start, stop in self._spans:
            ends = {start, max(start, stop - PEEK_BYTES)}
            ends_of_chunk = [self._pread(at, at + PEEK_BYTES) for at in ends]
            for line in b"\n".join(ends_of_chunk).split(b"\n"):
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    named |= dict.fromkeys(decode(line).connector_self_us)
        return list(named)

    def read(self, schema: Schema, strict: bool) -> StepFile:
        """Parse all chunks. Raises RecordsError if `strict`."""

        def parse(span: tuple[int, int]) -> StepFile:
            lines = self._pread(*span)
            frame, bad = _good(lines, schema)
            is_last = span == self._spans[-1]
            torn = is_last and bool(bad) and _is_torn_last(lines, bad[-1].row)
            told = [self._error(span[0], line) for line in bad[: len(bad) - torn]]
            if told and strict:
                raise told[0]
            return StepFile(frame, int(torn), tuple(map(str, told)))

        # Two threads, so that one reads while the other parses; order is kept.
        with ThreadPoolExecutor(2) as pool:
            read = list(pool.map(parse, self._spans))
        megabytes = f"over {LONGEST_LINE >> 20} MB in a line"
        long = [self._error(at, _BadLine(0, megabytes)) for at in self._long]
        if long and strict:
            raise long[0]
        rest = StepFile(_parse(b"", schema), self._torn, tuple(map(str, long)))
        return _together([*read, rest])

    def _pread(self, start: int, stop: int) -> bytes:
        return os.pread(self._file.fileno(), stop - start, start)

    def _error(self, start: int, line: _BadLine) -> RecordsError:
        """Name a line by its number, of the span that begins at `start`."""
        number = 1 + line.row
        for at in range(0, start, PIECE_BYTES):
            number += self._pread(at, min(at + PIECE_BYTES, start)).count(b"\n")
        return RecordsError(f"{self._path}:{number}: bad record: {line.why}")


def _column_type(name: str, methods: Sequence[str]) -> pl.DataType:
    """Choose the type of a column; times have 7 digits, 0.1 ns at 1 ms."""
    field = next(field for field in FIELDS if field.name == name)
    number = pl.Float32() if field.unit == "us" else pl.Int32()
    if field.by_method:
        # As floats, too: a column of calls may be summed with others.
        return pl.Struct(dict.fromkeys(methods, pl.Float32))
    return pl.Int64() if name in ("step_id", "t_ns") else number


def _line_spans(file: Any) -> tuple[list[tuple[int, int]], list[int], int]:
    """Byte spans of whole lines after the header, and 1 if the end is torn.

    Between them, the beginnings of lines over LONGEST_LINE bytes, which are in no span.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    file.readline()
    spans: list[tuple[int, int]] = []
    long: list[int] = []
    begin, torn = file.tell(), 0
    while begin < size:
        target = min(begin + CHUNK_BYTES, size)
        file.seek(target)
        skip_line(file)
        end = file.tell()
        whole = end
        if end - begin > LONGEST_LINE or end == size:
            # The last line of the span may be too long, or torn.
            file.seek(begin)
            whole = begin + file.read(target - begin).rfind(b"\n") + 1
            file.seek(end - 1)
            if file.read(1) != b"\n":
                torn = 1
            elif end - whole > LONGEST_LINE:
                long.append(whole)
            else:
                whole = end
        if begin < whole:
            spans.append((begin, whole))
        begin = end
    return spans, long, torn


class _BadLine(NamedTuple):
    row: int
    why: str


class _Methods(msgspec.Struct):
    connector_self_us: dict[str, msgspec.Raw] = {}


def _parse(lines: bytes, schema: Schema) -> pl.DataFrame:
    """Parse whole lines. Raises PolarsError, and RecordsError without a step's id."""
    if not lines:
        return pl.DataFrame(schema=schema)
    frame = pl.read_ndjson(lines, schema=schema)
    for name in {"step_id", "t_ns"} & schema.keys():
        if not frame[name].is_between(0, MOST).all(ignore_nulls=False):
            raise RecordsError(f"a record without {name}, or beyond 0 to 2**62")
    return frame


def _good(lines: bytes, schema: Schema) -> tuple[pl.DataFrame, list[_BadLine]]:
    """Parse the lines that are good; the bad ones are found by halving."""
    frames, bad = [_parse(b"", schema)], []

    def sort_out(rows: list[bytes], first: int) -> None:
        try:
            frames.append(_parse(b"".join(rows), schema))
        except (pl.exceptions.PolarsError, RecordsError) as error:
            if len(rows) == 1:
                bad.append(_BadLine(first, str(error)))
                return
            half = len(rows) // 2
            sort_out(rows[:half], first)
            sort_out(rows[half:], first + half)

    try:
        return _parse(lines, schema), []
    except (pl.exceptions.PolarsError, RecordsError):
        sort_out(lines.splitlines(keepends=True), 0)
    return pl.concat(frames), bad


def _is_torn_last(lines: bytes, row: int) -> bool:
    rows = lines.splitlines(keepends=True)
    return row == len(rows) - 1 and is_torn(rows[row])
