# SPDX-License-Identifier: Apache-2.0
"""The requests of an instance: those that ended, each with what its time went to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from lab.records import RecordsError
from lab.records.engine_requests import EngineRequest, read_engine_requests
from lab.records.warning import RunWarning
from look.split import split

FILE = "engine_request.jsonl"
FACTS = {
    "id": pl.String,
    "arrival_ns": pl.Int64,
    "end_ns": pl.Int64,
    "finish_reason": pl.String,
    "prompt_tokens": pl.Int64,
    "cached_tokens": pl.Int64,
    "external_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "preemptions": pl.Int64,
    "before_engine_us": pl.Float64,
    "kv_wait_ns": pl.List(pl.Int64),
    "preempted_steps": pl.List(pl.Int64),
    "first_step": pl.Int64,
    "first_token_step": pl.Int64,
    "last_step": pl.Int64,
    "ttft_us": pl.Float64,
    "tpot_us": pl.Float64,
    "e2e_us": pl.Float64,
}
NO_REQUESTS = pl.DataFrame(schema=FACTS)


def read_requests(
    folder: Path, steps: pl.DataFrame, every: int = 1
) -> tuple[pl.DataFrame, list[RunWarning]]:
    """A row per request that ended within `steps`, in order of arrival.

    Its columns are FACTS and those of look.split. Requests that cannot be placed are
    counted in a warning.
    """
    path = folder / FILE
    if not path.is_file():
        return NO_REQUESTS, []
    if every > 1:
        sampled = RunWarning(
            "sampled",
            f"one step in {every} was recorded: what requests waited for is not told",
            "Record every step to see it: unset KVTAX_STEP_RECORDS_EVERY",
        )
        return NO_REQUESTS, [sampled]
    try:
        lines = read_engine_requests(path)
    except RecordsError as error:
        bad = RunWarning(
            "requests_unreadable", str(error), "The requests are left out; see the file"
        )
        return NO_REQUESTS, [bad]
    ended = _table(lines.records).filter(pl.col("finished_ns").is_not_null())
    table = split(ended, steps).drop("finished_ns").sort("arrival_ns")
    unended, unplaced = len(lines.records) - ended.height, ended.height - table.height
    warnings = []
    for count, kind, told, remedy in (
        (
            lines.torn_lines,
            "torn_lines",
            f"{FILE}: torn last line left out",
            "Nothing: a stopped writer leaves one",
        ),
        (
            unended,
            "unended_requests",
            f"{unended:,} requests had not ended when the engine stopped",
            "They are left out of the table of requests",
        ),
        (
            unplaced,
            "unplaced_requests",
            f"{unplaced:,} requests name steps that are not recorded",
            "They are left out; steps are missing, or step_timing was not applied",
        ),
    ):
        if count:
            warnings.append(RunWarning(kind, told, remedy))
    return table, warnings


def _table(requests: list[EngineRequest]) -> pl.DataFrame:
    """A row per record, a column per field."""
    fields = EngineRequest.__struct_fields__
    types = {name: (FACTS | {"finished_ns": pl.Int64})[name] for name in fields}
    if not requests:
        return pl.DataFrame(schema=types)
    columns = zip(*map(msgspec.structs.astuple, requests), strict=True)
    # Told the types at once, lists are made five times as slowly.
    return pl.DataFrame(dict(zip(fields, columns, strict=True))).cast(types)
