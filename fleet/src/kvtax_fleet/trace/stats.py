# SPDX-License-Identifier: Apache-2.0
"""Describe a trace: lengths, turns, growth, sessions, and how much could be reused."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import polars as pl
from kvtax.report.markdown import table
from kvtax.report.render import escaped
from numpy.typing import NDArray

from kvtax_fleet.trace.request import Request, TraceError
from kvtax_fleet.trace.reuse import LruCache, Reuse, batches, prefix_keys

SCHEMA = "kvtax.trace_stats/1"
TOP_SESSIONS = 5


class Spread(msgspec.Struct):
    """A distribution."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Stats(msgspec.Struct):
    """A trace described. Shares are of 1; reuse is counted in blocks.

    `prefill_share`: input tokens of all tokens. Growth is of a session with several
    turns, from its first prompt to its last one.
    """

    schema: str
    source: str
    requests: int
    sessions: int
    duration_s: float  # from the first arrival to the last
    block_tokens: int
    input_tokens: Spread
    output_tokens: Spread
    io_ratio: float | None  # input tokens for each output token
    prefill_share: float
    turns_per_session: Spread
    input_tokens_per_session: Spread
    output_tokens_per_session: Spread
    growth_tokens_per_session: Spread | None
    context_growth_tokens: Spread | None  # from a turn to the next of its session
    think_s: Spread | None
    top_sessions_share_of_requests: float
    top_sessions_share_of_input_tokens: float
    largest_sessions: list[SessionRow]  # by input tokens
    blocks: int
    distinct_blocks: int
    intra_session_reuse: float
    cross_session_reuse: float
    intra_session_share_of_reuse: float | None
    apc_infinite: float
    cache_blocks: int | None
    apc_lru: float | None  # with a cache of cache_blocks


def describe(
    requests: Iterable[Request],
    source: str,
    cache_blocks: int | None = None,
) -> Stats:
    """Read a trace once and describe it, with a row for each of the largest sessions.

    Raises TraceError: the trace is empty, or not what it should be.
    """
    numbers: dict[str, int] = {}  # of the sessions, in order of their first requests
    reuse = Reuse()
    cache = LruCache(cache_blocks) if cache_blocks else None
    sessions, inputs, outputs = array("i"), array("i"), array("i")
    think_s = array("f")
    first: Request | None = None
    for batch in batches(requests):
        first = first or batch.requests[0]
        last = batch.requests[-1]
        inputs.extend(request.input_tokens for request in batch.requests)
        outputs.extend(request.output_tokens for request in batch.requests)
        think_s.extend(r.think_s for r in batch.requests if r.think_s is not None)
        own = [numbers.setdefault(r.session, len(numbers)) for r in batch.requests]
        sessions.extend(own)
        keys = prefix_keys(batch.ids, batch.lengths)
        reuse.add(keys, batch.lengths, np.array(own))
        if cache:
            cache.add(keys, batch.lengths)
    if first is None:
        raise TraceError(f"{source}: a trace without requests")
    return _stats(
        source=source,
        first=first,
        last=last,
        sessions=np.frombuffer(sessions, np.int32),
        inputs=np.frombuffer(inputs, np.int32),
        outputs=np.frombuffer(outputs, np.int32),
        think_s=np.frombuffer(think_s, np.float32),
        reuse=reuse,
        cache=cache,
        names=list(numbers),
    )


def _stats(
    *,
    source: str,
    first: Request,
    last: Request,
    sessions: NDArray[Any],
    inputs: NDArray[Any],
    outputs: NDArray[Any],
    think_s: NDArray[Any],
    reuse: Reuse,
    cache: LruCache | None,
    names: list[str],
) -> Stats:
    frame = pl.DataFrame({"session": sessions, "input": inputs, "output": outputs})
    each = per_session(frame)
    largest_sessions = each.sort(
        "input_tokens", descending=True, maintain_order=True
    ).head(TOP_SESSIONS)
    growth = frame.select(pl.col("input").diff().over("session")).drop_nulls()
    blocks = max(reuse.blocks, 1)
    output_sum = int(outputs.sum(dtype=np.int64))
    input_sum = int(inputs.sum(dtype=np.int64))
    reused = reuse.intra_session + reuse.cross_session
    return Stats(
        schema=SCHEMA,
        source=source,
        requests=len(inputs),
        sessions=len(names),
        duration_s=last.arrival_s - first.arrival_s,
        block_tokens=first.block_tokens,
        input_tokens=_spread(inputs),
        output_tokens=_spread(outputs),
        io_ratio=input_sum / output_sum if output_sum else None,
        prefill_share=input_sum / (input_sum + output_sum),
        turns_per_session=_spread(each["turns"].to_numpy()),
        input_tokens_per_session=_spread(each["input_tokens"].to_numpy()),
        output_tokens_per_session=_spread(each["output_tokens"].to_numpy()),
        growth_tokens_per_session=_spread_of(
            each.filter(pl.col("turns") > 1)["growth_tokens"].to_numpy()
        ),
        context_growth_tokens=_spread_of(growth["input"].to_numpy()),
        think_s=_spread_of(think_s),
        top_sessions_share_of_requests=_top_share(each["turns"]),
        top_sessions_share_of_input_tokens=_top_share(each["input_tokens"]),
        largest_sessions=[
            SessionRow(names[at], *values)
            for at, *values in largest_sessions.iter_rows()
        ],
        blocks=reuse.blocks,
        distinct_blocks=reuse.distinct,
        intra_session_reuse=reuse.intra_session / blocks,
        cross_session_reuse=reuse.cross_session / blocks,
        intra_session_share_of_reuse=reuse.intra_session / reused if reused else None,
        apc_infinite=reused / blocks,
        cache_blocks=cache.blocks if cache else None,
        apc_lru=cache.hits / blocks if cache else None,
    )


def _spread_of(values: NDArray[Any]) -> Spread | None:
    return _spread(values) if values.size else None


def _spread(values: NDArray[Any]) -> Spread:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Spread(
        n=len(values),
        mean=float(values.mean(dtype=np.float64)),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(values.max()),
    )


def _top_share(totals: pl.Series) -> float:
    return float(totals.top_k(TOP_SESSIONS).sum()) / float(totals.sum())


class SessionRow(msgspec.Struct):
    """One session of the table."""

    session: str
    turns: int
    input_tokens: int  # of all its prompts
    output_tokens: int
    first_input_tokens: int  # the first turn's prompt
    longest_input_tokens: int
    growth_tokens: int  # from the first turn's prompt to the last one's


def per_session(requests: pl.DataFrame) -> pl.DataFrame:
    """Describe each session, in order of their first requests.

    `requests` has `session`, `input` and `output`, as the requests came.
    """
    inputs = pl.col("input").cast(pl.Int64)
    return requests.group_by("session", maintain_order=True).agg(
        turns=pl.len().cast(pl.Int64),
        input_tokens=inputs.sum(),
        output_tokens=pl.col("output").cast(pl.Int64).sum(),
        first_input_tokens=inputs.first(),
        longest_input_tokens=inputs.max(),
        growth_tokens=inputs.last() - inputs.first(),
    )


COLUMNS = ("n", "mean", "p50", "p90", "p99", "max")
SESSION_COLUMNS = (
    "turns",
    "input tokens",
    "output tokens",
    "first prompt",
    "longest prompt",
    "growth",
)


def markdown(stats: Stats) -> str:
    """Format the statistics for people."""
    spreads = {
        "input tokens": stats.input_tokens,
        "output tokens": stats.output_tokens,
        "turns per session": stats.turns_per_session,
        "input tokens per session": stats.input_tokens_per_session,
        "output tokens per session": stats.output_tokens_per_session,
        "context growth per session, tokens": stats.growth_tokens_per_session,
        "context growth per turn, tokens": stats.context_growth_tokens,
        "think time, s": stats.think_s,
    }
    ratio = "none" if stats.io_ratio is None else f"{stats.io_ratio:,.1f}"
    within = stats.intra_session_share_of_reuse
    facts = {
        "requests": f"{stats.requests:,}",
        "sessions": f"{stats.sessions:,}",
        "duration": f"{stats.duration_s:,.0f} s",
        "input tokens per output token": ratio,
        "input tokens of all tokens (prefill share)": _percent(stats.prefill_share),
        f"requests of the top {TOP_SESSIONS} sessions": _percent(
            stats.top_sessions_share_of_requests
        ),
        f"input tokens of the top {TOP_SESSIONS} sessions": _percent(
            stats.top_sessions_share_of_input_tokens
        ),
        "tokens per block": f"{stats.block_tokens:,}",
        "blocks": f"{stats.blocks:,}",
        "distinct blocks": f"{stats.distinct_blocks:,}",
        "blocks seen before in the session": _percent(stats.intra_session_reuse),
        "blocks seen before in other sessions only": _percent(
            stats.cross_session_reuse
        ),
        "of the reusable blocks, in the session": "none"
        if within is None
        else _percent(within),
        "APC, infinite cache": _percent(stats.apc_infinite),
    }
    if stats.apc_lru is not None:
        facts[f"APC, LRU cache of {stats.cache_blocks:,} blocks"] = _percent(
            stats.apc_lru
        )
    parts = [
        f"# {escaped(stats.source)}",
        table(["", ""], [[name, value] for name, value in facts.items()]),
        table(
            ["", *COLUMNS], [[name, *_row(spread)] for name, spread in spreads.items()]
        ),
        table(
            ["largest sessions", *SESSION_COLUMNS],
            [_session(row) for row in stats.largest_sessions],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _session(row: SessionRow) -> list[str]:
    name, *values = msgspec.structs.astuple(row)
    return [escaped(name).replace("|", "/"), *(f"{value:,}" for value in values)]


def _row(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["0", *["-"] * (len(COLUMNS) - 1)]
    rest = (f"{getattr(spread, name):,.1f}" for name in COLUMNS[1:])
    return [f"{spread.n:,}", *rest]


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
