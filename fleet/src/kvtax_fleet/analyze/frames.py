# SPDX-License-Identifier: Apache-2.0
"""One row per request: what the client saw, joined with what the proxy decided.

Latencies (kvtax.stats.quantiles) are in ms. Only requests that ended ok have any.

New tokens = prompt - cached, from the server's usage. Where the prompt was computed
elsewhere, the serving instance counts what it was sent as cached; then it is what the
proxy took to be missing at the instance that computed it. Classes by new tokens are
those of kvtax_fleet.policies.decision.

The requests that several runs have in common: only these can be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import polars as pl
from kvtax.records.estimate import Estimate
from kvtax.records.requests import ReplayEnd
from kvtax.stats.distribution import Distribution
from kvtax.stats.quantiles import latency_columns

from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.policies.decision import (
    HEAVY_ABOVE_TOKENS,
    HUGE_ABOVE_TOKENS,
    WARM_BELOW_TOKENS,
)
from kvtax_fleet.records.arm import ArmRecord
from kvtax_fleet.records.decisions import DecisionRecord

# What arms are compared by, and what a reader calls it.
TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
LATENCIES = (*TITLES, "ttft_sent_ms", "e2e_sent_ms")

# Estimates by quantile; null if there are too few requests for it.
Levels = dict[str, Estimate | None]


def estimates(levels: dict[str, Distribution | None], digits: int) -> Levels:
    """Round levels as a document holds them."""
    return {at: estimate(level, digits) for at, level in levels.items()}


def estimate(level: Distribution | None, digits: int) -> Estimate | None:
    """Round a level as a document holds it."""
    return None if level is None else Estimate.of(level, digits)


REQUEST_COLUMNS: dict[str, Any] = {
    "id": pl.String,
    "session": pl.String,
    "turn": pl.Int64,
    "status": pl.String,
    "arrival_s": pl.Float64,
    "input_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "intended_ns": pl.Int64,
    "sent_ns": pl.Int64,
    "first_token_ns": pl.Int64,
    "end_ns": pl.Int64,
    "error": pl.String,
    "http_status": pl.Int64,
    "instance": pl.String,
    "prefill_instance": pl.String,
    "usage_prompt_tokens": pl.Int64,
    "usage_completion_tokens": pl.Int64,
    "cached_tokens": pl.Int64,
}
NOTHING = ArmRun(
    Path(), ArmRecord(arm="", repeat=0, status="failed"), [], None, [], [], {}, 0
)
DECISION_COLUMNS: dict[str, Any] = {
    "id": pl.String,
    "decided_instance": pl.String,
    "decided_class": pl.String,
    "asked_tokens": pl.Int64,
    "believed_cached": pl.Int64,
    "believed_cached_at_prefill": pl.Int64,
}


def requests_frame(runs: list[ArmRun]) -> pl.DataFrame:
    """Tabulate all requests of all arms and repeats, with `arm` and `repeat`."""
    frames = [_one(run) for run in runs]
    return pl.concat(frames) if frames else _one(NOTHING).clear()


def _one(run: ArmRun) -> pl.DataFrame:
    rows = [msgspec.structs.asdict(request) for request in run.requests]
    requests = pl.DataFrame(rows, schema=REQUEST_COLUMNS)
    decided = pl.DataFrame(
        [_decided(line) for line in run.decisions], schema=DECISION_COLUMNS
    ).unique("id", keep="last", maintain_order=True)
    ended = pl.DataFrame(
        [
            {
                "id": unquote(end.id),
                "used_prefill": end.prefill_instance,
                "fallback": end.fallback,
            }
            for end in run.decision_ends
        ],
        schema={"id": pl.String, "used_prefill": pl.String, "fallback": pl.String},
    ).unique("id", keep="last", maintain_order=True)
    return (
        requests.join(decided, on="id", how="left", maintain_order="left")
        .join(ended, on="id", how="left", maintain_order="left")
        .with_columns(
            pl.lit(run.info.arm).alias("arm"),
            pl.lit(run.info.repeat, pl.Int64).alias("repeat"),
            # Not the decision's: an offload that failed fell back.
            pl.coalesce("prefill_instance", "used_prefill").alias("prefill_instance"),
            pl.coalesce("instance", "decided_instance").alias("instance"),
            _window(steady_window_ns(run.end)).alias("window"),
        )
        .with_columns(_cached_tokens())
        .with_columns(*_latency(), _new_tokens())
        .with_columns(size_class())
    )


def _decided(line: DecisionRecord) -> dict[str, Any]:
    return {
        # The replayer quotes characters that a header may not hold.
        "id": unquote(line.id),
        "decided_instance": line.instance,
        "decided_class": line.kind,
        "asked_tokens": line.prompt_tokens,
        "believed_cached": _believed_cached(line, line.instance),
        "believed_cached_at_prefill": _believed_cached(line, line.prefill_instance),
    }


def _believed_cached(line: DecisionRecord, instance: str | None) -> int | None:
    """Tokens of the prompt that the proxy took to be cached at `instance`."""
    for candidate in line.snapshot.candidates:
        if candidate.name == instance:
            return candidate.cached_tokens
    return None


def steady_window_ns(end: ReplayEnd | None) -> tuple[int, int] | None:
    """From start to before end of the steady window; None without one."""
    window = end and end.steady
    return (window.start_ns, window.end_ns) if window else None


def _window(window_ns: tuple[int, int] | None) -> pl.Expr:
    if window_ns is None:
        return pl.lit(None, pl.String)
    at = pl.col("intended_ns")
    return (
        pl.when(at < window_ns[0])
        .then(pl.lit("warmup"))
        .when(at >= window_ns[1])
        .then(pl.lit("drain"))
        .when(at.is_not_null())
        .then(pl.lit("steady"))
    )


def _latency() -> list[pl.Expr]:
    ok = pl.col("status") == "ok"
    return [
        pl.when(ok).then(column)
        for column in latency_columns("usage_completion_tokens")
    ]


def _cached_tokens() -> pl.Expr:
    """vLLM leaves the count out of its usage where it is 0; some servers never tell."""
    cached = pl.col("cached_tokens")
    tells = cached.is_not_null().any() & pl.col("usage_prompt_tokens").is_not_null()
    return pl.when(tells).then(cached.fill_null(0)).otherwise(cached)


def _new_tokens() -> pl.Expr:
    elsewhere = pl.col("prefill_instance").is_not_null()
    there = pl.col("asked_tokens") - pl.col("believed_cached_at_prefill")
    here = pl.col("usage_prompt_tokens") - pl.col("cached_tokens")
    believed = pl.col("asked_tokens") - pl.col("believed_cached")
    return (
        pl.when(elsewhere)
        .then(there)
        .otherwise(pl.coalesce(here, believed))
        .alias("new_tokens")
    )


def size_class() -> pl.Expr:
    new = pl.col("new_tokens")
    return (
        pl.when(new < WARM_BELOW_TOKENS)
        .then(pl.lit("WARM"))
        .when(new <= HEAVY_ABOVE_TOKENS)
        .then(pl.lit("MEDIUM"))
        .when(new <= HUGE_ABOVE_TOKENS)
        .then(pl.lit("HEAVY"))
        .when(new.is_not_null())
        .then(pl.lit("HUGE"))
        .otherwise(pl.col("decided_class"))
        .alias("class")
    )


# Fewer steady requests in common than this are too few to leave the others out.
MIN_COMMON = 50


def same_requests(arms: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """("steady" or "all", the requests to compare out of those of all `arms`).

    Those that ended ok in every repeat of every arm, and were in the steady window
    there: each arm has a window of its own, and a slow arm's holds other turns. Where
    these are fewer than MIN_COMMON, those of any window.
    """
    runs = arms.select("arm", "repeat").n_unique()
    ok = arms.filter(pl.col("status") == "ok")
    steady = _in_all(ok.filter(pl.col("window") == "steady"), runs)
    if steady["id"].n_unique() >= MIN_COMMON:
        return "steady", steady
    return "all", _in_all(ok, runs)


def _in_all(requests: pl.DataFrame, runs: int) -> pl.DataFrame:
    seen = pl.struct("arm", "repeat").n_unique().over("id")
    return requests.filter(seen == runs)
