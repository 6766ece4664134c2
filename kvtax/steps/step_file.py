# SPDX-License-Identifier: Apache-2.0
"""The reader of step files: one file of an engine or a worker as a table.

Files may be gigabytes, so they are read in chunks of whole lines: one chunk is in
memory at a time, and a bad line is still found by its number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import polars as pl

from kvtax.records import RecordsError
from kvtax.records.files import is_torn, read_header
from kvtax.records.parts import LONGEST_LINE, PIECE_BYTES, parts_of, seekable, skip_line
from kvtax.records.steps import (
    FIELDS,
    METHOD_FIELDS,
    MOST,
    EngineHeader,
    WorkerHeader,
    another_life,
)

# Big enough to parse at full speed. Of more files than FEW_FILES, which are read side
# by side, chunks are smaller: all of them need no more memory.
CHUNK_BYTES, FEW_FILES = 16 << 20, 12
# Begin and end of a chunk in which methods are searched that the header lacks; a
# line's beginning is searched in pieces of so many.
PEEK_BYTES = 64 << 10
# Fields by method, and how their columns end.
BY_METHOD = {"connector_self_us": "_us", "connector_calls": "_calls"}
# The calls of a line, and their names.
CALLS_OF = re.compile(rb'"connector_(?:self_us|us)"\s*:\s*\{([^{}]*)\}')
METHOD = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
Schema = dict[str, pl.DataType]


@dataclass(frozen=True)
class StepFile:
    """A step file as a table, and its number of torn lines."""

    frame: pl.DataFrame
    torn_lines: int


Kind = type[EngineHeader] | type[WorkerHeader]


def read_steps(path: Path, header_kind: Kind, columns: Sequence[str]) -> StepFile:
    """Read `columns` of a whole step file. Raises RecordsError for a bad line."""
    reader = StepReader(path, header_kind, columns, strict=True)
    return StepFile(pl.concat([*reader], rechunk=False), reader.torn_lines)


class StepReader:
    """The `columns` of a step file, `step_id` among them, in chunks of lines.

    A column by connector method is a struct with the methods of the header, and any
    that the chunk has beside. The file's older part, if there is one, comes first.
    Raises RecordsError naming file and line for a bad line that is not the last. If not
    `strict`, it and what is no part of this file are left out, as long as a part is
    left: `bad` names them, and `torn_lines` counts last lines that were cut off.
    `files` are how many are read side by side.
    """

    def __init__(
        self,
        path: Path,
        header_kind: Kind,
        columns: Sequence[str],
        strict: bool = False,
        files: int = 1,
    ) -> None:
        self._strict = strict
        self.torn_lines = 0
        self.bad: list[str] = []
        self._parts: list[_Part] = []
        bad: list[RecordsError] = []
        chunk_bytes = max(CHUNK_BYTES * FEW_FILES // max(files, FEW_FILES), 1)
        with ExitStack() as stack:
            for part in reversed(parts_of(path)):
                try:
                    header = _header_of(part, header_kind, self._parts)
                    file = stack.enter_context(seekable(part))
                    self._parts.append(_Part(part, header, file, chunk_bytes))
                except RecordsError as error:
                    bad.append(error)
            if bad and (strict or not self._parts):
                raise bad[0]
            self._files = stack.pop_all()
        self.bad += map(str, bad)
        self.header = self._parts[0].header
        methods: dict[str, None] = {}
        for read in reversed(self._parts) if BY_METHOD.keys() & set(columns) else ():
            methods |= read.methods()
        self.schema = {name: _column_type(name, [*methods]) for name in columns}

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield a frame for each chunk; at least one, if only an empty one."""
        with self._files:
            for part in reversed(self._parts):
                yield from part.frames(self)

    def leave_out(self, error: RecordsError) -> None:
        """Note a line that is left out. Raises it if the reader is strict."""
        if self._strict:
            raise error
        self.bad.append(str(error))

    def close(self) -> None:
        self._files.close()


# Steps that are held back until the next chunk, which may have one before them.
HELD_BACK = 64
# Share and number of steps that are in a file twice, from which on two processes wrote
# it.
MOST_TWICE, FEW_TWICE = 0.01, 10


def in_order(path: Path, reader: StepReader) -> Iterator[pl.DataFrame]:
    """Yield chunks sorted by step_id (async scheduling may swap neighbours).

    Of a step that is there twice the first stays, and the reader names the others.
    Raises RecordsError if two processes wrote the file.
    """
    order = _Order(path, reader)
    for frame in reader:
        yield from order.ready(frame)
    yield order.rest()


class _Order:
    """The order of a file's steps: what came, and what is held back."""

    def __init__(self, path: Path, reader: StepReader) -> None:
        self._path, self._reader = path, reader
        self._held: pl.DataFrame | None = None
        self._last_id = self._last_ns = -1
        self._steps = self._twice = self._copies = 0
        self._again: int | None = None

    def ready(self, frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield the steps that no later chunk can precede."""
        if self._held is not None:
            frame = pl.concat([self._held, frame], how="vertical")
        ordered = self._each_once(frame)
        count = max(ordered.height - HELD_BACK, 0)
        self._held = ordered[count:]
        if count:
            yield self._passed(ordered[:count])

    def rest(self) -> pl.DataFrame:
        """Return what is held back; name the steps that were there twice."""
        assert self._held is not None
        if self._twice > max(FEW_TWICE, MOST_TWICE * self._steps):
            raise RecordsError(
                f"{self._path}: {self._twice:,} steps twice: two processes wrote this "
                "file; keep the records of each process in a folder of its own"
            )
        if again := self._twice + self._copies:
            self._reader.leave_out(
                RecordsError(
                    f"{self._path}: {again:,} steps are in the file twice, as step_id "
                    f"{self._again}; the first one counts"
                )
            )
        return self._passed(self._held)

    def _passed(self, frame: pl.DataFrame) -> pl.DataFrame:
        if frame.height:
            self._last_id = frame["step_id"][-1]
            self._last_ns = max(self._last_ns, int(frame["t_ns"].to_numpy().max()))
        return frame

    def _note(self, again: pl.DataFrame) -> None:
        if again.height and self._again is None:
            self._again = int(again["step_id"][0])

    def _each_once(self, frame: pl.DataFrame) -> pl.DataFrame:
        self._steps += frame.height
        if (np.diff(frame["step_id"].to_numpy()) <= 0).any():
            frame = frame.sort("step_id", maintain_order=True)
            same = frame.filter(pl.col("step_id") == pl.col("step_id").shift(1))
            self._note(same)
            alone = frame.unique("step_id", keep="first", maintain_order=True)
            of_one = frame.unique(["step_id", "t_ns"]).height
            self._twice += of_one - alone.height
            self._copies += frame.height - of_one
            frame = alone
        if frame.height and frame["step_id"][0] <= self._last_id:
            again = pl.col("step_id") <= self._last_id
            past = frame.filter(again)
            self._note(past)
            later = past.filter(pl.col("t_ns") > self._last_ns).height
            self._twice += later
            self._copies += past.height - later
            frame = frame.filter(~again)
        return frame


def _header_of(
    path: Path, header_kind: Kind, newer: Sequence[_Part]
) -> EngineHeader | WorkerHeader:
    """Read the header of a part whose `newer` part is open. Raises RecordsError."""
    header = read_header(path, header_kind)
    if newer and (why := another_life(newer[0].header, header)):
        raise RecordsError(f"{path}: {why}")
    return header


class _Part:
    """An open file of lines, which is parsed in chunks."""

    def __init__(
        self,
        path: Path,
        header: EngineHeader | WorkerHeader,
        file: BinaryIO,
        chunk_bytes: int,
    ) -> None:
        self.header = header
        self._path, self._file = path, file
        self._spans, self._long, self._torn = _line_spans(file, chunk_bytes)

    def frames(self, reader: StepReader) -> Iterator[pl.DataFrame]:
        """Parse chunk after chunk. Raises RecordsError if the reader is strict."""
        reader.torn_lines += self._torn
        for start in self._long:
            over = _BadLine(0, f"over {LONGEST_LINE >> 20} MB in a line")
            reader.leave_out(self._error(start, over))
        for span in self._spans:
            lines = self._pread(*span)
            frame, bad = _good(lines, reader.schema)
            is_last = span == self._spans[-1]
            if is_last and bad and _is_torn_last(lines, bad[-1].row):
                reader.torn_lines += 1
                bad.pop()
            for line in bad:
                reader.leave_out(self._error(span[0], line))
            yield frame
        if not self._spans:
            yield _parse(b"", reader.schema)

    def methods(self) -> dict[str, None]:
        """Name the methods of the header, and those that the chunks have beside."""
        named = dict.fromkeys(self.header.methods)
        for start, stop in self._spans:
            # Older recorders did not name them in the header.
            step = PEEK_BYTES if self.header.methods else stop - start
            for at in {start, max(start, stop - step)}:
                lines = self._pread(at, min(at + step, stop))
                for calls in CALLS_OF.findall(lines):
                    named |= dict.fromkeys(map(_plain, METHOD.findall(calls)))
                if not self.header.methods:
                    named |= dict.fromkeys(
                        name for name, key in self._keys() if key in lines
                    )
        return named

    def _keys(self) -> Iterator[tuple[str, bytes]]:
        """Yield the methods that have a field of their own, and its key in a line."""
        side = "scheduler" if isinstance(self.header, EngineHeader) else "worker"
        for name, field in METHOD_FIELDS[side].items():
            yield name, f'"{field}":'.encode()

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


def _line_spans(
    file: BinaryIO, chunk_bytes: int
) -> tuple[list[tuple[int, int]], list[int], int]:
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
        target = min(begin + chunk_bytes, size)
        file.seek(target)
        skip_line(file)
        end = file.tell()
        # The last line of the span may be too long, or torn.
        whole = _line_start(file, begin, target)
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


def _line_start(file: BinaryIO, begin: int, place: int) -> int:
    """Find where the line of a place begins; not before `begin`, which starts one."""
    while place > begin:
        at = max(begin, place - PEEK_BYTES)
        newline = os.pread(file.fileno(), place - at, at).rfind(b"\n")
        if newline >= 0:
            return at + newline + 1
        place = at
    return begin


class _BadLine(NamedTuple):
    row: int
    why: str


def _plain(name: bytes) -> str:
    """Decode a name as it stands in JSON."""
    return str(msgspec.json.decode(b'"' + name + b'"'))


def _parse(lines: bytes, schema: Schema) -> pl.DataFrame:
    """Parse whole lines. Raises PolarsError, and RecordsError without a step's id."""
    if not lines:
        return pl.DataFrame(schema=schema)
    frame = pl.read_ndjson(lines, schema=schema)
    for name in {"step_id", "t_ns"} & schema.keys():
        if not frame[name].is_between(0, MOST).all(ignore_nulls=False):
            raise RecordsError(f"a record without {name}, or beyond 0 to 2**62")
    return frame


def _parse_fast(lines: bytes, schema: Schema) -> pl.DataFrame:
    """Parse lines that are nearly all good. Raises what _parse does, and oftener.

    A struct's fields take time in each line, also where the line has none of them: they
    are parsed apart.
    """
    by_name = {
        name: kind
        for name, kind in schema.items()
        if isinstance(kind, pl.Struct) and kind.fields
    }
    frame = _parse(lines, {**schema, **dict.fromkeys(by_name, pl.String())})
    return frame.with_columns(_by_name(frame[name], by_name[name]) for name in by_name)


def _by_name(texts: pl.Series, kind: pl.Struct) -> pl.Series:
    """Parse the texts that are not null, as structs. Raises PolarsError."""
    if texts.null_count() == len(texts):
        return pl.Series(texts.name, dtype=kind).clear(len(texts))
    known = texts.is_not_null()
    few = texts.filter(known).str.json_decode(kind).struct.unnest()
    row = pl.when(known).then(known.cum_sum() - 1).cast(pl.UInt32).alias("row")
    rows = pl.select(row)
    fields = [
        pl.lit(None, of.dtype).alias(of.name)
        if of.null_count() == len(of)
        else pl.lit(of.gather(rows["row"]))
        for of in few
    ]
    return rows.with_columns(pl.struct(fields).alias(texts.name))[texts.name]


def _good(lines: bytes, schema: Schema) -> tuple[pl.DataFrame, list[_BadLine]]:
    """Parse the lines that are good; the bad ones are found by halving."""
    try:
        return _parse_fast(lines, schema), []
    except (pl.exceptions.PolarsError, RecordsError):
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

    sort_out(lines.splitlines(keepends=True), 0)
    return pl.concat(frames), bad


def _is_torn_last(lines: bytes, row: int) -> bool:
    rows = lines.splitlines(keepends=True)
    return row == len(rows) - 1 and is_torn(rows[row])
