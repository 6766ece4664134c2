# SPDX-License-Identifier: Apache-2.0
"""The requests of an instance: those that ended, each with what its time went to.

From its arrival to its last token a request either waits to be scheduled, waits for KV
from another instance, or takes part in the engine's steps. The time of a step is that
of its parts, and what lies between the end of a step and the start of the next is
`other`. So the parts of a request add up to its time by construction.

All requests of a step wait for the same work at the same time. The waits of two
requests are never added up: the sum would count that work twice.

Where steps overlap, their parts run at the same time, and a moment counts once: for the
connector, else for the scheduler, else for the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from kvtax.records import RecordsError
from kvtax.records.parts import PIECE_BYTES, opened, parts_of
from kvtax.records.requests import EngineRequest, read_engine_requests
from kvtax.records.steps import EngineHeader, another_life
from kvtax.records.warning import RunWarning, Warn, left_out
from kvtax.stats.distribution import Floats, Ints
from kvtax.stats.quantiles import tpot
from kvtax.steps.parts import method_columns

FILE = "engine_request.jsonl"
FACTS: dict[str, pl.DataType | type[pl.DataType]] = {
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


# Requests of which the time is split: of more, every n-th, as felt shares are then
# known to a part in a thousand.
MOST_REQUESTS = 200_000


class Recorded(NamedTuple):
    """Requests that ended, or every n-th of them, with FACTS as far as recorded."""

    table: pl.DataFrame
    all: int
    warnings: list[RunWarning]


def read_requests(folder: Path, header: EngineHeader) -> Recorded:
    """Read the requests that ended in a life; one that is impossible is counted."""
    path = folder / FILE
    nothing = _table([]).drop_nulls("finished_ns")
    parts = [part for part in parts_of(path) if part.exists()]
    if not parts:
        return Recorded(nothing, 0, [])
    if (every := header.every) > 1:
        return Recorded(nothing, 0, [Warn.SAMPLED(FILE, every=every)])
    try:
        step = 1 + sum(map(_line_count, parts)) // MOST_REQUESTS
        lines = read_engine_requests(path, strict=False, step=step)
    except RecordsError as error:
        return Recorded(nothing, 0, [Warn.REQUESTS_UNREADABLE(FILE, error=error)])
    if why := another_life(header, lines.header):
        return Recorded(nothing, 0, [Warn.ANOTHER_LIFE(path.name, path=path, why=why)])
    recorded = _table(lines.records)
    ended = recorded.filter(pl.col("finished_ns").is_not_null())
    possible = ended.filter(_possible(ended))
    warnings = left_out(FILE, lines.torn_lines, lines.bad)
    missing = {
        Warn.UNENDED_REQUESTS: recorded.height - ended.height,
        Warn.IMPOSSIBLE_REQUESTS: ended.height - possible.height,
    }
    warnings += [warn(FILE, count=count) for warn, count in missing.items() if count]
    return Recorded(possible, step * possible.height, warnings)


def _line_count(path: Path) -> int:
    """Count the lines of a part of the file. Raises RecordsError."""
    try:
        with opened(path) as file:
            pieces = iter(lambda: file.read(PIECE_BYTES), b"")
            return sum(piece.count(b"\n") for piece in pieces)
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None


def _possible(requests: pl.DataFrame) -> pl.Expr:
    """Select requests whose moments are in order, and whose counts are not negative."""

    def in_order(earlier: str, later: str) -> pl.Expr:
        return (pl.col(earlier) <= pl.col(later)).fill_null(value=True)

    back = pl.concat([_going_back(requests[name]) for name in MOMENTS])
    counts = ("prompt_tokens", "output_tokens", "preemptions")
    return pl.all_horizontal(
        in_order("arrival_ns", "finished_ns"),
        *(in_order(*names) for names in itertools.combinations(NAMED_STEPS, 2)),
        ~pl.int_range(pl.len()).is_in(back.to_list()),
        pl.all_horizontal(pl.col(counts) >= 0),
        pl.col("before_engine_us").fill_null(0) >= 0,
    )


def _going_back(lists: pl.Series) -> pl.Series:
    """Find the rows whose list goes back somewhere."""
    row = pl.int_range(pl.len()).alias("row")
    flat = lists.to_frame("moment").with_columns(row).explode("moment")
    back = pl.col("moment") < pl.col("moment").shift(1)
    same_row = pl.col("row") == pl.col("row").shift(1)
    return flat.filter(back & same_row)["row"]


def _table(requests: list[EngineRequest]) -> pl.DataFrame:
    """Make a row per record and a column per field."""
    return pl.DataFrame(
        [_column(name, requests) for name in EngineRequest.__struct_fields__]
    )


def _column(name: str, requests: list[EngineRequest]) -> pl.Series:
    kind = (FACTS | {"finished_ns": pl.Int64})[name]
    values = [getattr(request, name) for request in requests]
    if not isinstance(kind, pl.List):
        return pl.Series(name, values, kind)
    # Most lists are empty, which takes 50 times as long as null.
    lists = pl.Series(name, [of or None for of in values], kind)
    return pl.select(
        pl.when(lists.is_null()).then(pl.lit([], kind)).otherwise(lists).alias(name)
    ).to_series()


WAITS = ("queued_us", "kv_wait_us")
# The first of them that runs has a moment.
TIMED_PARTS = ("connector_us", "scheduler_us", "model_us")
MOMENTS = ("preempted_steps", "kv_wait_ns")
NAMED_STEPS = ("first_step", "first_token_step", "last_step")
# Share of a request's steps without a worker's record, above which its parts are not
# known.
MOST_UNKNOWN = 0.01
# The row of a step that is not there, or that nobody named.
ABSENT = -1


class Marks:
    """The steps that requests name, with the steps between two of them as one.

    A request's time in steps is the difference of two sums, so these are enough.
    """

    def __init__(self, requests: pl.DataFrame) -> None:
        named = [requests[name].drop_nulls() for name in NAMED_STEPS]
        named.append(requests["preempted_steps"].explode().drop_nulls().cast(pl.Int64))
        self._ids: Ints = pl.concat(named).unique().sort().to_numpy()
        # Of one that ended between two steps, its end.
        unnamed = requests.filter(pl.col("last_step").is_null())
        self._moments: Ints = unnamed["finished_ns"].sort().to_numpy()
        self._frames: list[pl.DataFrame] = []

    def add(self, steps: pl.DataFrame) -> None:
        """Add steps in order, with `is_long`."""
        if not steps.height or not len(self._ids) + len(self._moments):
            return
        ids, begun = steps["step_id"].to_numpy(), steps["t_ns"].to_numpy()
        is_named = _is_in(ids, self._ids)
        last = np.searchsorted(begun, self._moments, "right") - 1
        is_named[last[last >= 0]] = True
        begins = is_named | np.append(True, is_named[:-1])
        self._frames.append(_summed(steps.rechunk(), np.flatnonzero(begins)))

    def rows(self) -> pl.DataFrame:
        """Tabulate a row per step that is named, and per stretch between."""
        if not self._frames:
            return NO_ROWS
        return pl.concat(self._frames, how="diagonal")


def _summed(steps: pl.DataFrame, starts: Ints) -> pl.DataFrame:
    """Make a row per group of steps; the groups begin at `starts`."""
    parts = [*TIMED_PARTS, *method_columns(steps)]
    last = np.append(starts[1:], steps.height) - 1
    counts = {
        "without_worker": steps["execute_model_us"].is_null(),
        "long": steps["is_long"],
        "known": steps["connector_us"].is_not_null(),
    }
    us = steps.select(pl.col(parts).cast(pl.Float64).fill_null(0)).to_numpy().T
    columns = {
        **{name: steps[name].to_numpy()[starts] for name in ("step_id", "t_ns")},
        "end_ns": steps["end_ns"].to_numpy()[last],
        "steps": last - starts + 1,
        **{
            name: np.add.reduceat(of.to_numpy(), starts, dtype=np.int64)
            for name, of in counts.items()
        },
        **{
            name: np.add.reduceat(of, starts)
            for name, of in zip(parts, us, strict=True)
        },
    }
    return pl.DataFrame([pl.Series(name, of) for name, of in columns.items()])


def _is_in(ids: Ints, named: Ints) -> npt.NDArray[np.bool_]:
    """Decide which of the ids are named; both are in order."""
    own = named[slice(*np.searchsorted(named, (ids[0], ids[-1] + 1)))]
    at = np.searchsorted(ids, own)
    is_in = np.zeros(len(ids), bool)
    is_in[at] = ids[at] == own
    return is_in


NO_ROWS = pl.DataFrame(
    schema={
        **dict.fromkeys(("step_id", "t_ns", "end_ns"), pl.Int64()),
        **dict.fromkeys(("steps", "without_worker", "long", "known"), pl.Int64()),
        **dict.fromkeys(TIMED_PARTS, pl.Float64()),
    }
)


def split(
    recorded: Recorded, rows: pl.DataFrame
) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Select the requests whose steps are all there, and split their time.

    Added to their FACTS are `end_ns`, `ttft_us`, `tpot_us` and `e2e_us`, `is_long` of
    those that were in a long step, and in us `ttft.PART` and `e2e.PART` for each part
    of WAITS, of TIMED_PARTS, `other_us` and each method of the connector. Those until
    the first token are null without one, and all but the waits where over MOST_UNKNOWN
    of a request's steps have no worker's record. They are in order of arrival.
    """
    requests = recorded.table
    steps = _Rows(rows)
    rows_of = np.array([steps.of(requests[name]) for name in NAMED_STEPS])
    named = np.array([requests[name].is_not_null() for name in NAMED_STEPS])
    placed = ((rows_of != ABSENT) == named).all(axis=0)
    warnings = []
    if count := requests.height - int(placed.sum()):
        warnings.append(Warn.UNPLACED_REQUESTS(FILE, count=count))
    requests, (first, token, last) = requests.filter(placed), rows_of[:, placed]
    if not requests.height:
        return NO_REQUESTS, warnings
    finished_ns = requests["finished_ns"].to_numpy()
    end_ns = np.where(last == ABSENT, finished_ns, steps.end_ns[last])
    # One that ended between two steps was in those that had begun.
    begun = np.searchsorted(steps.begin_ns, end_ns, "right") - 1
    last = np.where(last == ABSENT, begun, last)
    waits = _Waits(steps, requests, first)
    spans = {
        "ttft": waits.until(token, steps.end_ns[token]),
        "e2e": waits.until(last, end_ns),
    }
    columns = dict(_parts(spans, rows))
    added = (
        pl.DataFrame(columns)
        .fill_nan(None)
        .insert_column(0, pl.Series("end_ns", end_ns))
    )
    has_token = pl.col("first_token_step").is_not_null()
    decode_us = pl.col("e2e_us") - pl.col("ttft_us")
    table = requests.hstack(added).with_columns(
        pl.when(has_token).then(
            pl.col([name for name in columns if name.startswith("ttft")])
        ),
        pl.when(has_token)
        .then(tpot(decode_us, pl.col("output_tokens")))
        .alias("tpot_us"),
    )
    return table.drop("finished_ns").sort("arrival_ns"), warnings


class _Rows:
    """The steps by row; the moments of ABSENT, which is the last row, say nothing."""

    def __init__(self, steps: pl.DataFrame) -> None:
        beyond = np.iinfo(np.int64).max
        self._ids: Ints = np.append(steps["step_id"].to_numpy(), beyond)
        self.begin_ns: Ints = np.append(steps["t_ns"].to_numpy(), beyond)
        self.end_ns: Ints = np.append(steps["end_ns"].to_numpy(), beyond)

    def of(self, step_ids: pl.Series) -> Ints:
        """Find the rows of these steps; ABSENT for null and for an unrecorded step."""
        wanted = step_ids.fill_null(ABSENT).to_numpy()
        at = np.searchsorted(self._ids[:-1], wanted)
        is_there = (self._ids[at] == wanted) & (at < len(self._ids) - 1)
        return np.where(is_there, at, ABSENT)


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
        """Sum up us in the span's steps, given the sums before each row."""
        us = self.sign * (before_us[self.stop] - before_us[self.start])
        total: Floats = np.bincount(self.of, us, len(self.whole_us)).astype(float)
        return total


class _Waits:
    """Waits of requests: their kind and their beginning."""

    def __init__(self, rows: _Rows, requests: pl.DataFrame, first: Ints) -> None:
        self._rows, self._first = rows, first
        self._arrival_ns: Ints = requests["arrival_ns"].to_numpy()
        preempted = _pairs_of(requests["preempted_steps"])
        # Preempted, until it went on: it was not in these steps, it queued.
        self._paused = preempted["of"].to_numpy()
        self._gone, self._came = rows.of(preempted["begin"]), rows.of(preempted["end"])
        self._kv = _pairs_of(requests["kv_wait_ns"])

    def until(self, last: Ints, until_ns: Ints) -> _Span:
        """Make the span from arrival to `until_ns`, the end of the step at `last`."""
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
        """Sum up ns in which each queued request waited for KV."""
        last_ns = pl.Series(until_ns[self._kv["of"].to_numpy()])
        both = self._kv.with_columns(pl.col("end").fill_null(last_ns)).join(
            queued, on="of"
        )
        begin, end = (
            pl.max_horizontal("begin", "since"),
            pl.min_horizontal("end", "until"),
        )
        ns = both.select((end - begin).clip(lower_bound=0)).to_series()
        total = np.bincount(both["of"], ns.to_numpy(), len(until_ns)).astype(float)
        return np.asarray(total)


def _pairs_of(lists: pl.Series) -> pl.DataFrame:
    """`of`, the row of each pair, its `begin`, and its `end`, which may be null."""
    rows = (lists.list.len() > 0).arg_true()
    of_rows = [
        (row, *pair)
        for row, moments in zip(rows, lists.gather(rows).to_list(), strict=True)
        for pair in pairs(moments)
    ]
    columns = dict.fromkeys(("of", "begin", "end"), pl.Int64)
    return pl.DataFrame(of_rows, columns, orient="row")


def pairs(moments: list[int], last: int | None = None) -> list[tuple[int, int | None]]:
    """(begin, end) of a list that has them in turn; `last` where the end is missing."""
    ends = [*moments[1::2], *([last] if len(moments) % 2 else [])]
    return list(zip(moments[::2], ends, strict=True))


def _parts(
    spans: dict[str, _Span], steps: pl.DataFrame
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the parts of each span, by column."""
    left_us = {}
    for name, span in spans.items():
        yield f"{name}_us", span.whole_us
        yield f"{name}.queued_us", span.queued_us
        yield f"{name}.kv_wait_us", span.kv_wait_us
        waited_us = span.queued_us + span.kv_wait_us
        left_us[name] = np.maximum(span.whole_us - waited_us, 0)

    def inside(column: str) -> dict[str, Floats]:
        before: Floats = np.append(0.0, steps[column].fill_null(0).cum_sum())
        return {name: span.inside(before) for name, span in spans.items()}

    whole, without, in_long = map(inside, ("steps", "without_worker", "long"))
    # Where no step has a worker's record, the scheduler's side is all there is.
    has_worker = steps["without_worker"].sum() < steps["steps"].sum()
    unknown = {
        name: has_worker & (without[name] > MOST_UNKNOWN * whole[name])
        for name in spans
    }
    yield "is_long", in_long["e2e"] > 0
    kept: dict[str, Floats] = {}
    for part in (*TIMED_PARTS, *method_columns(steps)):
        if part == "connector_us" and steps.height and not steps["known"].sum():
            continue
        for name, us in inside(part).items():
            us[unknown[name]] = np.nan
            if part in TIMED_PARTS:
                in_steps_us, us = us, np.minimum(us, left_us[name])
                left_us[name] = left_us[name] - us
                if part == "connector_us":
                    kept[name] = us / np.where(in_steps_us > 0, in_steps_us, 1)
            else:
                us = us * kept[name]
            yield f"{name}.{part}", us
    for name, us in left_us.items():
        yield f"{name}.other_us", us
