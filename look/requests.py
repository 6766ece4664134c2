# SPDX-License-Identifier: Apache-2.0
"""The requests of an instance, each with what its time went to.

From its arrival to its last token a request either waits to be scheduled, waits for KV
from another instance, or takes part in the engine's steps. The time of a step is that
of its parts, and what lies between the end of a step and the start of the next is
`other`. So the parts of a request add up to its time by construction.

All requests of a step wait for the same work at the same time. The waits of two
requests are never added up: the sum would count that work twice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from lab.records import RecordsError
from lab.records.engine_requests import EngineRequest, read_engine_requests
from lab.records.joined_steps import method_columns
from lab.records.warning import RunWarning
from lab.stats.estimate import Floats, Ints

FILE = "engine_request.jsonl"
WAITS = ("queued_us", "kv_wait_us")
STEP_PARTS = ("model_us", "scheduler_us", "connector_us")
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

    Its columns are FACTS; `ttft.PART` and `e2e.PART`, in us, for each part of WAITS, of
    STEP_PARTS, `other_us` and each method of the connector. The methods are the parts
    of `connector_us`; the others add up to `ttft_us` and `e2e_us`. `ttft` is null
    without a first token. Requests that cannot be placed are counted in a warning.
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
    split = _Split(steps)
    rows, unended, unplaced = [], 0, 0
    for request in lines.records:
        if request.finished_ns is None:
            unended += 1
        elif (row := split.row(request)) is None:
            unplaced += 1
        else:
            rows.append(row)
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
    if not rows:
        return NO_REQUESTS, warnings
    table = pl.DataFrame(rows, schema_overrides=FACTS, infer_schema_length=None)
    return table.sort("arrival_ns"), warnings


class _Split:
    """Splits the time of requests by the parts of the steps they were in."""

    def __init__(self, steps: pl.DataFrame) -> None:
        self._ids: Ints = steps["step_id"].to_numpy()
        self._begins: Ints = steps["t_ns"].to_numpy()
        self._ends: Ints = steps["end_ns"].to_numpy()
        self._names = [*STEP_PARTS, *method_columns(steps)]
        parts = steps.select(self._names).to_numpy().astype(float)
        # Row i: the sum over the steps before the i-th.
        self._sums: Floats = np.vstack([np.zeros(len(self._names)), parts.cumsum(0)])

    def row(self, request: EngineRequest) -> dict | None:
        """What became of a request that ended; None if its steps are not there."""
        named = (request.first_step, request.first_token_step, request.last_step)
        placed = [self._index(step) for step in named]
        if any(
            at is None and step is not None
            for at, step in zip(placed, named, strict=True)
        ):
            return None
        first, token, last = placed
        told = {name: getattr(request, name, None) for name in FACTS}
        end_ns = request.finished_ns if last is None else int(self._ends[last])
        told |= {"end_ns": end_ns, "e2e_us": (end_ns - request.arrival_ns) / 1e3}
        if token is not None:
            token_ns = int(self._ends[token])
            told["ttft_us"] = (token_ns - request.arrival_ns) / 1e3
            told |= self._parts("ttft", request, first, token_ns, token)
            if request.output_tokens > 1:
                rest = request.output_tokens - 1
                told["tpot_us"] = (end_ns - token_ns) / 1e3 / rest
        return told | self._parts("e2e", request, first, end_ns, last)

    def _index(self, step_id: int | None) -> int | None:
        if step_id is None:
            return None
        at = int(np.searchsorted(self._ids, step_id))
        there = at < len(self._ids) and self._ids[at] == step_id
        return at if there else None

    def _parts(
        self,
        span: str,
        request: EngineRequest,
        first: int | None,
        end_ns: int,
        last: int | None,
    ) -> dict[str, float]:
        """The parts of the time from arrival to `end_ns`, which ends step `last`."""
        if last is None:
            # It ended between two steps: after the last one that had begun.
            last = int(np.searchsorted(self._begins, end_ns, "right")) - 1
        scheduled_ns = end_ns if first is None else int(self._begins[first])
        waits = [(request.arrival_ns, scheduled_ns)]
        sums = np.zeros(len(self._names))
        if first is not None:
            sums = self._sums[last + 1] - self._sums[first]
            for left, back in pairs(request.preempted_steps):
                gone, came = self._index(left), self._index(back)
                if gone is None or gone > last:
                    continue
                came = last + 1 if came is None else min(came, last + 1)
                sums -= self._sums[came] - self._sums[gone]
                back_ns = end_ns if came > last else int(self._begins[came])
                waits.append((int(self._begins[gone]), back_ns))
        kv_ns = sum(
            max(min(stop, end) - max(start, begin), 0)
            for start, stop in pairs(request.kv_wait_ns, end_ns)
            for begin, end in waits
        )
        waited_us = sum(end - begin for begin, end in waits) / 1e3
        parts = dict(zip(self._names, sums.tolist(), strict=True))
        parts |= {"queued_us": waited_us - kv_ns / 1e3, "kv_wait_us": kv_ns / 1e3}
        told = sum(parts[name] for name in (*WAITS, *STEP_PARTS))
        parts["other_us"] = (end_ns - request.arrival_ns) / 1e3 - told
        return {f"{span}.{name}": us for name, us in parts.items()}


def pairs(moments: list[int], last: int | None = None) -> list[tuple[int, int | None]]:
    """(begin, end) of a list that has them in turn; `last` where the end is missing."""
    ends = [*moments[1::2], *([last] if len(moments) % 2 else [])]
    return list(zip(moments[::2], ends, strict=True))
