# SPDX-License-Identifier: Apache-2.0
"""What the time of requests went to, for all requests of an instance at once.

From its arrival to its last token a request either waits to be scheduled, waits for KV
from another instance, or takes part in the engine's steps. The time of a step is that
of its parts, and what lies between the end of a step and the start of the next is
`other`. So the parts of a request add up to its time by construction.

All requests of a step wait for the same work at the same time. The waits of two
requests are never added up: the sum would count that work twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from lab.records.joined_steps import method_columns
from lab.stats.estimate import Floats, Ints

WAITS = ("queued_us", "kv_wait_us")
STEP_PARTS = ("model_us", "scheduler_us", "connector_us")
NAMED_STEPS = ("first_step", "first_token_step", "last_step")
# The row of a step that is not there, or that nobody named.
ABSENT = -1


def split(requests: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The `requests` whose steps are all there, and what their time went to.

    `requests` have the fields of an EngineRequest as columns, and have ended. Added are
    `end_ns`, `ttft_us`, `tpot_us` and `e2e_us`, and in us `ttft.PART` and `e2e.PART`
    for each part of WAITS, of STEP_PARTS, `other_us` and each method of the connector.
    Those until the first token are null without one.
    """
    rows = _Rows(steps)
    found = np.array([rows.of(requests[name]) for name in NAMED_STEPS])
    named = np.array([requests[name].is_not_null() for name in NAMED_STEPS])
    placed = ((found != ABSENT) == named).all(axis=0)
    requests, (first, token, last) = requests.filter(placed), found[:, placed]
    finished_ns = requests["finished_ns"].to_numpy()
    end_ns = np.where(last == ABSENT, finished_ns, rows.end_ns[last])
    # One that ended between two steps was in those that had begun.
    begun = np.searchsorted(rows.begin_ns, end_ns, "right") - 1
    last = np.where(last == ABSENT, begun, last)
    waits = _Waits(rows, requests, first)
    spans = {
        "ttft": waits.until(token, rows.end_ns[token]),
        "e2e": waits.until(last, end_ns),
    }
    told = pl.DataFrame({"end_ns": end_ns, **dict(_parts(spans, steps))})
    has_token = pl.col("first_token_step").is_not_null()
    further = pl.col("output_tokens") - 1
    tpot_us = (pl.col("e2e_us") - pl.col("ttft_us")) / further
    return requests.hstack(told).with_columns(
        pl.when(has_token).then(pl.col("^ttft[._].*$")),
        pl.when(has_token & (further > 0)).then(tpot_us).alias("tpot_us"),
    )


class _Rows:
    """The steps by row; the moments of ABSENT, which is the last row, say nothing."""

    def __init__(self, steps: pl.DataFrame) -> None:
        beyond = np.iinfo(np.int64).max
        self._ids: Ints = np.append(steps["step_id"].to_numpy(), beyond)
        self.begin_ns: Ints = np.append(steps["t_ns"].to_numpy(), beyond)
        self.end_ns: Ints = np.append(steps["end_ns"].to_numpy(), beyond)

    def of(self, step_ids: pl.Series) -> Ints:
        """Where these steps are; ABSENT for null, and for a step that is not there."""
        wanted = step_ids.fill_null(ABSENT).to_numpy()
        at = np.searchsorted(self._ids, wanted)
        return np.where(self._ids[at] == wanted, at, ABSENT)


@dataclass(frozen=True)
class _Span:
    """A stretch of each request's time, from its arrival on: in us, (requests,).

    Request `of[i]` was in the steps from row `start[i]` to before `stop[i]`, or, where
    `sign[i]` is -1, was not.
    """

    whole_us: Floats
    queued_us: Floats
    kv_wait_us: Floats
    of: Ints
    start: Ints
    stop: Ints
    sign: Ints

    def inside(self, before_us: Floats) -> Floats:
        """us in its steps, given the sum over the steps before each row."""
        us = self.sign * (before_us[self.stop] - before_us[self.start])
        return np.bincount(self.of, us, len(self.whole_us))


class _Waits:
    """Who waited for what, and since when."""

    def __init__(self, rows: _Rows, requests: pl.DataFrame, first: Ints) -> None:
        self._rows, self._first = rows, first
        self._arrival_ns: Ints = requests["arrival_ns"].to_numpy()
        preempted = _pairs_of(requests["preempted_steps"])
        # Preempted, until it went on: it was not in these steps, it queued.
        self._paused = preempted["of"].to_numpy()
        self._gone, self._came = rows.of(preempted["begin"]), rows.of(preempted["end"])
        self._kv = _pairs_of(requests["kv_wait_ns"])

    def until(self, last: Ints, until_ns: Ints) -> _Span:
        """From the arrival to `until_ns`, which ends the step at row `last`."""
        rows, first = self._rows, self._first
        begun = np.flatnonzero(first != ABSENT)
        scheduled_ns = np.where(first == ABSENT, until_ns, rows.begin_ns[first])
        of, gone, came = self._paused, self._gone, self._came
        counts = (first[of] != ABSENT) & (gone != ABSENT) & (gone <= last[of])
        of, gone, came = of[counts], gone[counts], came[counts]
        after = last[of] + 1
        came = np.where(came == ABSENT, after, np.minimum(came, after))
        back_ns = np.where(came == after, until_ns[of], rows.begin_ns[came])
        queued = pl.DataFrame(
            {
                "of": np.append(np.arange(len(first)), of),
                "since": np.append(self._arrival_ns, rows.begin_ns[gone]),
                "until": np.append(scheduled_ns, back_ns),
            }
        )
        queued_ns = np.bincount(queued["of"], queued["until"] - queued["since"])
        kv_wait_ns = self._kv_wait_ns(queued, until_ns)
        return _Span(
            whole_us=(until_ns - self._arrival_ns) / 1e3,
            queued_us=(queued_ns - kv_wait_ns) / 1e3,
            kv_wait_us=kv_wait_ns / 1e3,
            of=np.append(begun, of),
            start=np.append(first[begun], gone),
            stop=np.append(last[begun] + 1, came),
            sign=np.append(np.ones_like(begun), -np.ones_like(of)),
        )

    def _kv_wait_ns(self, queued: pl.DataFrame, until_ns: Ints) -> Floats:
        """ns in which each request waited for KV, of the time in which it queued."""
        last_ns = pl.Series(until_ns[self._kv["of"].to_numpy()])
        both = self._kv.with_columns(pl.col("end").fill_null(last_ns)).join(
            queued, on="of"
        )
        begin, end = (
            pl.max_horizontal("begin", "since"),
            pl.min_horizontal("end", "until"),
        )
        ns = both.select((end - begin).clip(lower_bound=0)).to_series()
        return np.bincount(both["of"], ns, len(until_ns))


def _pairs_of(lists: pl.Series) -> pl.DataFrame:
    """`of`, the row of each pair, its `begin`, and its `end`, which may be null."""
    rows = (lists.list.len() > 0).arg_true()
    told = [
        (row, *pair)
        for row, moments in zip(rows, lists.gather(rows).to_list(), strict=True)
        for pair in pairs(moments)
    ]
    columns = dict.fromkeys(("of", "begin", "end"), pl.Int64)
    return pl.DataFrame(told, columns, orient="row")


def pairs(moments: list[int], last: int | None = None) -> list[tuple[int, int | None]]:
    """(begin, end) of a list that has them in turn; `last` where the end is missing."""
    ends = [*moments[1::2], *([last] if len(moments) % 2 else [])]
    return list(zip(moments[::2], ends, strict=True))


def _parts(
    spans: dict[str, _Span], steps: pl.DataFrame
) -> Iterator[tuple[str, Floats]]:
    """What is told of each span, by column."""
    left_us = {}
    for name, span in spans.items():
        yield f"{name}_us", span.whole_us
        yield f"{name}.queued_us", span.queued_us
        yield f"{name}.kv_wait_us", span.kv_wait_us
        left_us[name] = span.whole_us - span.queued_us - span.kv_wait_us
    before_us = np.zeros(steps.height + 1)
    for part in (*STEP_PARTS, *method_columns(steps)):
        np.cumsum(steps[part].to_numpy(), out=before_us[1:])
        for name, span in spans.items():
            us = span.inside(before_us)
            yield f"{name}.{part}", us
            if part in STEP_PARTS:
                left_us[name] = left_us[name] - us
    for name, us in left_us.items():
        yield f"{name}.other_us", us
