# SPDX-License-Identifier: Apache-2.0
"""Request latencies as the driver saw them, and what a connector adds to TPOT.

Requests that ended ok: of the growth and plateau phases, in trials whose requests were
sent on time, and those that decode in holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from kvtax.records.per_config import Addition, ConfigEntry, TpotAddition
from kvtax.records.profile import Ladder
from kvtax.records.requests import DECODERS, Phase, place_of
from kvtax.stats.quantiles import latency_columns, tpot_of
from kvtax.verdict.trials import LoadedTrial

FORWARD_MS = (7.0, 25.0)
APC = (0.0, 0.5, 0.9)
MOMENTS = ("intended_ns", "sent_ns", "first_token_ns", "end_ns")
COLUMNS = {name: pl.Int64 for name in (*MOMENTS, "output_tokens", "phase")}


def latencies_ms(trials: list[LoadedTrial]) -> dict[str, dict[str, float] | None]:
    """p50, p90, p99 in ms of each latency over the repeats; None without a request."""
    ok = [
        (*(getattr(request, name) for name in (*MOMENTS, "output_tokens")), phase)
        for trial in trials
        if trial.requests and not trial.late
        for request in trial.requests.requests
        if request.status == "ok"
        and (phase := Phase.of(request.phase)) in (Phase.GROWTH, Phase.PLATEAU)
    ]
    frame = pl.DataFrame(ok, schema=COLUMNS, orient="row")
    ms = frame.with_columns(latency_columns("output_tokens"))
    plateau = ms.filter(pl.col("phase") == Phase.PLATEAU)
    return {
        "ttft_ms": _spread(ms["ttft_ms"]),
        "ttft_sent_ms": _spread(ms["ttft_sent_ms"]),
        "tpot_ms": _spread(ms["tpot_ms"]),
        "tpot_plateau_ms": _spread(plateau["tpot_ms"]),
        "e2e_ms": _spread(ms["e2e_ms"]),
        "e2e_sent_ms": _spread(ms["e2e_sent_ms"]),
    }


def log_tpot(trials: Sequence[LoadedTrial], ladder: Ladder) -> list[float]:
    """Compute the log of each server's median TPOT in us at the stated |cache|.

    Of the requests that decode in its holds; those with many are left out.
    """
    found = []
    for trial in trials:
        requests = (
            trial.requests.requests
            if trial.requests and trial.steps is not None
            else []
        )
        us = [
            tpot_of(one.first_token_ns / 1e3, one.end_ns / 1e3, one.output_tokens or 0)
            for one in requests
            if one.status == "ok"
            and Phase.of(one.phase) is Phase.FILL
            and one.phase.endswith(DECODERS)
            and place_of(one.phase)[1:] == (ladder.stated_level, ladder.decoders)
            and one.first_token_ns is not None
            and one.end_ns is not None
        ]
        if known := [one for one in us if one]:
            found.append(round(float(np.log(np.median(known))), 6))
    return found


def _spread(values: pl.Series) -> dict[str, float] | None:
    known = values.drop_nulls().to_numpy()
    if not len(known):
        return None
    numbers = np.quantile(known, (0.5, 0.9, 0.99))
    return dict(zip(("p50", "p90", "p99"), np.round(numbers, 4).tolist(), strict=True))


def request_counts(trials: list[LoadedTrial]) -> dict[str, int]:
    """scheduled, ok, failed, cancelled over the repeats, from the records."""
    counts = dict.fromkeys(("scheduled", "ok", "failed", "cancelled"), 0)
    for trial in trials:
        if trial.requests is None:
            continue
        counts["scheduled"] += trial.requests.scheduled
        for request in trial.requests.requests:
            if request.status is not None:
                counts[request.status] += 1
    return counts


def send_lag_ms(trials: list[LoadedTrial]) -> dict[str, Any] | None:
    """Return the worst send lag of the repeats, with its budget."""
    ends = [t.requests.end for t in trials if t.requests and t.requests.end]
    lags = [end for end in ends if end.lag_ms]
    if not lags:
        return None
    worst = max(lags, key=lambda end: (end.lag_ms or {}).get("p99") or 0.0)
    return {
        **(worst.lag_ms or {}),
        "budget": worst.lag_budget_ms,
        "valid": all(end.valid is not False for end in lags),
    }


def tpot_addition(
    baseline: ConfigEntry, config: ConfigEntry, own_forward_ms: float
) -> TpotAddition | None:
    """Predict what a connector adds to TPOT at the stated |cache|, in ms and %.

    From the attributed parts (us) of `baseline` and `config`. With W the worker's share
    of a step and S everything else, less the null model's own forward time, and a
    forward of f:

    - sync scheduling: a token takes S + W + f, so the addition is in full.
    - async scheduling: step N+1 is scheduled while N runs, so a token takes
      max(S, W + f), and the scheduler-side addition hides until S passes W + f.

    A token of a decoding request takes one step, so the addition in ms does not
    depend on the APC; the APC sets how fast |cache| is reached. Steps that also
    prefill are longer, so the % is an upper bound.
    """
    ours, theirs = _sides_ms(config), _sides_ms(baseline)
    if ours is None or theirs is None:
        return None
    predictions = {}
    for forward in (own_forward_ms, *FORWARD_MS):
        rest = forward - own_forward_ms
        sync = sum(theirs) + rest, sum(ours) + rest
        overlapped = max(theirs[0], theirs[1] + rest), max(ours[0], ours[1] + rest)
        predictions[f"{forward:g}"] = {
            "sync": _addition(*sync),
            "async": _addition(*overlapped),
        }
    phase, levels = "plateau", (baseline.tpot_plateau_ms, config.tpot_plateau_ms)
    if not all(levels):
        phase, levels = "all", (baseline.tpot_ms, config.tpot_ms)
    p50s = [level["p50"] for level in levels if level]
    measured = round(p50s[1] - p50s[0], 5) if len(p50s) == 2 else None
    return TpotAddition(predictions, measured, phase)


def _sides_ms(config: ConfigEntry) -> tuple[float, float] | None:
    """(scheduler side, worker side) of a step in ms."""
    parts = config.attribution_us
    if parts is None:
        return None
    worker = sum(
        parts[name] or 0.0
        for name in (
            "bind",
            "start_load_kv",
            "wait_for_save",
            "get_finished",
            "execute_model_rest",
        )
    )
    return ((parts["step"] or 0.0) - worker) / 1e3, worker / 1e3


def _addition(before: float, after: float) -> Addition:
    added = after - before
    percent = round(100 * added / before, 3) if before > 0 else None
    return Addition(round(added, 5), percent)


def requests_to_fill(
    at_cache_blocks: int, trials: list[LoadedTrial], block_size: int
) -> dict[str, float] | None:
    """Compute how many requests fill the stated |cache|, by APC.

    at_cache_blocks / ((1 - APC) x prompt blocks), with the median prompt of the run.
    """
    prompts = [
        request.prompt_tokens
        for trial in trials
        if trial.requests and not trial.late
        for request in trial.requests.requests
        if Phase.of(request.phase) is Phase.GROWTH and request.prompt_tokens
    ]
    if not prompts or at_cache_blocks <= 0:
        return None
    blocks = max(float(np.median(prompts)) // block_size, 1)
    return {f"{apc:g}": round(at_cache_blocks / ((1 - apc) * blocks), 1) for apc in APC}
