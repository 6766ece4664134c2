# SPDX-License-Identifier: Apache-2.0
"""Step files as tables.

They may be gigabytes, so they are read in chunks of whole lines: the peak memory is
one chunk per thread, and a bad line is still found by its number.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lab.records import RecordsError
from lab.records.lines import is_torn, read_header

# Big enough to parse at full speed; two chunks in flight need little memory.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class StepFile:
    """What was kept of a step file, and how many records and torn lines it had."""

    frame: pl.DataFrame
    records: int
    torn_lines: int


def older_part(path: Path) -> Path:
    """Where a writer that keeps its files small moves `path` before it goes on."""
    return path.with_name(f"{path.name}.1")


def read_steps(
    path: Path,
    header_kind: type[msgspec.Struct],
    columns: Sequence[str],
    shape: Callable[[pl.LazyFrame], pl.LazyFrame] = lambda chunk: chunk,
) -> StepFile:
    """The `columns` of a step file, `step_id` among them, after `shape`.

    A column by connector method is a struct with the methods that the header names.
    `shape` is applied to each chunk: it filters and narrows before anything is kept.
    The file's older part, if there is one, comes first.
    Raises RecordsError naming file and line for a bad line that is not the last.
    """
    parts = [_read_part(path, header_kind, columns, shape)]
    if older_part(path).is_file():
        parts.insert(0, _read_part(older_part(path), header_kind, columns, shape))
    return _together(parts)


def _together(parts: Sequence[StepFile]) -> StepFile:
    return StepFile(
        frame=pl.concat([part.frame for part in parts], rechunk=False),
        records=sum(part.records for part in parts),
        torn_lines=sum(part.torn_lines for part in parts),
    )


def _read_part(
    path: Path,
    header_kind: type[msgspec.Struct],
    columns: Sequence[str],
    shape: Callable[[pl.LazyFrame], pl.LazyFrame],
) -> StepFile:
    methods = read_header(path, header_kind).methods
    schema = {name: _column_type(name, methods) for name in columns}
    with path.open("rb") as file:
        spans, torn = _line_spans(file)
        descriptor = file.fileno()

        def parse(span: tuple[int, int]) -> StepFile:
            start, stop = span
            lines = os.pread(descriptor, stop - start, start)
            try:
                frame, torn = _parse(lines, schema), 0
            except pl.exceptions.PolarsError:
                last = span == spans[-1]
                lines = _without_torn_tail(path, start, lines, schema, last)
                frame, torn = _parse(lines, schema), 1
            if frame["step_id"].null_count():
                row = frame["step_id"].is_null().arg_max()
                line = _line_number(path, start) + (row or 0)
                raise RecordsError(f"{path}:{line}: a record without step_id")
            return StepFile(shape(frame.lazy()).collect(), frame.height, torn)

        # Two threads, so that one reads while the other parses; order is kept.
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(parse, spans))
    if not parts:
        parts = [StepFile(shape(_parse(b"", schema).lazy()).collect(), 0, 0)]
    return _together([*parts, StepFile(parts[0].frame.clear(), 0, torn)])


def _column_type(name: str, methods: Sequence[str]) -> Any:
    """Times as 32-bit floats: 7 digits, 0.1 ns at 1 ms."""
    if name.startswith("connector_"):
        return pl.Struct(dict.fromkeys(methods, pl.Float32))
    if name.endswith("_us"):
        return pl.Float32
    return pl.Int64 if name in ("step_id", "t_ns") else pl.Int32


def _line_spans(file: Any) -> tuple[list[tuple[int, int]], int]:
    """Byte spans of whole lines after the header, and 1 if the end is torn."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    file.readline()
    cuts = [file.tell()]
    while cuts[-1] < size:
        file.seek(min(cuts[-1] + CHUNK_BYTES, size))
        file.readline()
        cuts.append(file.tell())
    file.seek(max(size - 1, 0))
    torn = int(size > cuts[0] and file.read(1) != b"\n")
    if torn:
        file.seek(cuts[-2])
        cuts[-1] = cuts[-2] + file.read().rfind(b"\n") + 1
    spans = [span for span in itertools.pairwise(cuts) if span[0] < span[1]]
    return spans, torn


def _parse(lines: bytes, schema: dict[str, Any]) -> pl.DataFrame:
    if not lines:
        return pl.DataFrame(schema=schema)
    return pl.read_ndjson(lines, schema=schema)


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n") + 1


def _without_torn_tail(
    path: Path, start: int, lines: bytes, schema: dict[str, Any], last: bool
) -> bytes:
    """`lines` less a torn last line of the file; any other bad line is an error."""
    rows = lines.splitlines(keepends=True)
    for index, row in enumerate(rows):
        try:
            _parse(row, schema)
        except pl.exceptions.PolarsError as error:
            if last and index == len(rows) - 1 and is_torn(row):
                return b"".join(rows[:-1])
            line = _line_number(path, start) + index
            raise RecordsError(f"{path}:{line}: bad record: {error}") from None
    raise RecordsError(f"{path}: records could not be parsed")
