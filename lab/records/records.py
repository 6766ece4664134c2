# SPDX-License-Identifier: Apache-2.0
"""Read the files of a run directory: what each holds is told in docs/records.md.

Step files are JSON lines and may be gigabytes, so they are read in chunks of whole
lines: the peak memory is one chunk a thread, and a bad line is found by number.
A writer that was killed leaves at most one torn last line; it is dropped and counted.
A bad line anywhere else means that the file is not what it claims to be: an error.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lab.records import RecordsError

RUN_SCHEMA = "kvtax.run/1"
TRIAL_SCHEMA = "kvtax.trial/1"
ENGINE_SCHEMA = "kvtax.engine_step/1"
WORKER_SCHEMA = "kvtax.worker_step/1"
REQUESTS_SCHEMA = "kvtax.requests/1"
PER_CONFIG_SCHEMA = "kvtax.per_config/1"

# Times as 32-bit floats: 7 digits, 0.1 ns at 1 ms. Fields not named here are skipped.
ENGINE_FIELDS: dict[str, Any] = {
    "step_id": pl.Int64,
    "t_ns": pl.Int64,
    "schedule_us": pl.Float32,
    "build_meta_us": pl.Float32,
    "step_us": pl.Float32,
    "scheduled": pl.Int32,
    "prefill_tokens": pl.Int32,
    "decode_tokens": pl.Int32,
    "cache_size": pl.Int32,
    "update_us": pl.Float32,
}
WORKER_TIMES = (
    "execute_model_us",
    "bind_us",
    "start_load_kv_us",
    "wait_for_save_us",
    "get_finished_us",
)
WORKER_FIELDS: dict[str, Any] = {"step_id": pl.Int64} | dict.fromkeys(
    WORKER_TIMES, pl.Float32
)

# Big enough to parse at full speed, small enough that two in flight are nothing.
CHUNK_BYTES = 8 << 20


class PhaseStart(msgspec.Struct, tag_field="type", tag="phase"):
    """Start of a phase; `reset_ns` is when /reset_prefix_cache answered OK."""

    name: str
    start_ns: int
    reset_ns: int | None = None


class Request(msgspec.Struct, tag_field="type", tag="request"):
    """What became of one scheduled request; a moment that never came is None."""

    id: int | str
    phase: str
    status: str
    error: str | None = None
    http_status: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    intended_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None


class End(msgspec.Struct, tag_field="type", tag="end"):
    """The driver's own account; absent if the driver was killed."""

    scheduled: int
    ok: int
    failed: int
    cancelled: int
    lag_ms: dict[str, float | None] | None = None
    lag_budget_ms: float | None = None
    valid: bool | None = None


@dataclass(frozen=True)
class StepFile:
    """What was kept of a step file, and how many records and torn lines it had."""

    frame: pl.DataFrame
    records: int
    torn_lines: int


@dataclass(frozen=True)
class Requests:
    """The content of one requests.jsonl."""

    scheduled: int
    phases: list[PhaseStart]
    requests: list[Request]
    end: End | None
    torn_lines: int


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """The JSON object in `path`; RecordsError if missing, bad or of another schema."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise RecordsError(f"{path}: missing") from None
    except msgspec.DecodeError as error:
        raise RecordsError(f"{path}: not JSON: {error}") from None
    _require_schema(path, document, schema)
    return document


def read_header(path: Path, schema: str) -> dict[str, Any]:
    """The header line of a JSON lines file, checked to be of `schema`."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        header = msgspec.json.decode(line)
    except FileNotFoundError:
        raise RecordsError(f"{path}: missing") from None
    except msgspec.DecodeError:
        raise RecordsError(f"{path}:1: no header line") from None
    _require_schema(path, header, schema)
    return header


def _require_schema(path: Path, document: Any, schema: str) -> None:
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise RecordsError(
            f"{path}: schema is {found!r}, this reader needs {schema!r}; "
            "use the kvtax version that wrote the run"
        )


def read_steps(
    path: Path,
    schema: str,
    fields: dict[str, Any],
    shape: Callable[[pl.LazyFrame], pl.LazyFrame],
) -> StepFile:
    """The records of a step file after `shape`.

    `shape` is applied to each chunk: it filters and narrows before anything is kept.
    Raises RecordsError naming file and line for a bad line that is not the last.
    """
    read_header(path, schema)
    with path.open("rb") as file:
        spans, torn = _line_spans(file)
        descriptor = file.fileno()

        def parse(span: tuple[int, int]) -> StepFile:
            start, stop = span
            lines = os.pread(descriptor, stop - start, start)
            try:
                frame, torn = _parse(lines, fields), 0
            except pl.exceptions.PolarsError:
                last = span == spans[-1]
                lines = _without_torn_tail(path, start, lines, fields, last)
                frame, torn = _parse(lines, fields), 1
            if frame["step_id"].null_count():
                row = frame["step_id"].is_null().arg_max()
                line = _line_number(path, start) + (row or 0)
                raise RecordsError(f"{path}:{line}: a record without step_id")
            return StepFile(shape(frame.lazy()).collect(), frame.height, torn)

        # Two threads, so that one reads while the other parses; order is kept.
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(parse, spans))
    if not parts:
        empty = shape(_parse(b"", fields).lazy()).collect()
        return StepFile(empty, 0, torn)
    return StepFile(
        frame=pl.concat([part.frame for part in parts], rechunk=False),
        records=sum(part.records for part in parts),
        torn_lines=torn + sum(part.torn_lines for part in parts),
    )


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


def _parse(lines: bytes, fields: dict[str, Any]) -> pl.DataFrame:
    if not lines:
        return pl.DataFrame(schema=fields)
    return pl.read_ndjson(lines, schema=fields)


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n") + 1


def _without_torn_tail(
    path: Path, start: int, lines: bytes, fields: dict[str, Any], last: bool
) -> bytes:
    """`lines` less a bad last line of the file; any other bad line is an error."""
    rows = lines.splitlines(keepends=True)
    for index, row in enumerate(rows):
        try:
            _parse(row, fields)
        except pl.exceptions.PolarsError as error:
            if last and index == len(rows) - 1:
                return b"".join(rows[:-1])
            line = _line_number(path, start) + index
            raise RecordsError(f"{path}:{line}: bad record: {error}") from None
    raise RecordsError(f"{path}: records could not be parsed")


def read_requests(path: Path) -> Requests:
    """The driver's records: phases, one record a request, and the end account."""
    header = read_header(path, REQUESTS_SCHEMA)
    decoder = msgspec.json.Decoder(PhaseStart | Request | End)
    whole = path.read_bytes()
    lines = whole.split(b"\n")[1:]
    tail = lines.pop() if lines else b""
    torn = int(bool(tail))
    records: list[PhaseStart | Request | End] = []
    for number, line in enumerate(lines, start=2):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines) + 1 and not torn:
                torn = 1
                break
            raise RecordsError(f"{path}:{number}: bad record: {error}") from None
    ends = [record for record in records if isinstance(record, End)]
    return Requests(
        scheduled=int(header.get("scheduled", 0)),
        phases=[record for record in records if isinstance(record, PhaseStart)],
        requests=[record for record in records if isinstance(record, Request)],
        end=ends[-1] if ends else None,
        torn_lines=torn,
    )
