# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run and its configs."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kvtax.records.per_config import ConfigEntry, ConfigEvidence, NoiseFloor
from kvtax.records.run import RunRecord
from kvtax.records.warning import RunWarning, Warn
from kvtax.stats import Estimate
from kvtax.verdict.metrics import DECISIVE, MARGIN_US_PER_1K_BLOCKS, margin_of
from kvtax.verdict.roles import Roles


def undecided(entry: ConfigEntry) -> list[RunWarning]:
    """Warn of an inconclusive config; its verdict's words have the bounds."""
    if entry.verdict != "inconclusive" or not entry.held:
        return []
    return [Warn.UNDECIDED()]


def growth_alone(
    entry: ConfigEntry, slopes: Mapping[str, Estimate | None]
) -> list[RunWarning]:
    """Warn if a cost rose while the cache first filled, and not with the levels.

    `slopes` in us per 1,000 blocks are those of the growth phase, by metric.
    """
    if entry.verdict in ("grows", "drifts"):
        return []
    for metric, slope in slopes.items():
        held = entry.held.get(metric)
        if held is None or slope is None or slope.ci95 is None:
            continue
        if slope.ci95[0] > max(MARGIN_US_PER_1K_BLOCKS, held.most_us_per_1k_blocks):
            return [Warn.GROWTH_ALONE(metric=metric, slope=slope)]
    return []


def open_metrics(entry: ConfigEntry) -> list[str]:
    """List the metrics that keep a config from flat, but those not measured."""
    return [name for name in DECISIVE if entry.verdict_of.get(name) == "inconclusive"]


def largest_relative_bound(entry: ConfigEntry) -> float:
    """Compute the largest bound that keeps a config from flat, by its margin.

    Of configs without a verdict, the one with the least is measured again first.
    """
    return max(
        (
            entry.held[name].most_us_per_1k_blocks / margin_of(name)
            for name in open_metrics(entry)
        ),
        default=0.0,
    )


FEW_STEPS = 200
# A step that takes this many times the median of its batch size was interrupted.
SLOW_TIMES = 5
SLOW_SHARE = 0.01
MISSING_SHARE = 0.01


def config_warnings(entry: ConfigEntry, evidence: ConfigEvidence) -> list[RunWarning]:
    """Warn of what makes the numbers of one config doubtful."""
    share = evidence.interrupted_share
    interrupted = Warn.INTERRUPTED(share=share, times=SLOW_TIMES)
    return [
        *([Warn.TRIALS_FAILED(error=entry.error)] if entry.error else []),
        *_of_estimates(entry),
        *_of_records(entry),
        *_of_requests(entry),
        *[interrupted] * (share > SLOW_SHARE),
        *undecided(entry),
        *growth_alone(entry, evidence.growth_slopes),
    ]


def _of_estimates(entry: ConfigEntry) -> list[RunWarning]:
    warnings = []
    if (steps := entry.n_window_steps) < FEW_STEPS:
        warnings.append(Warn.FEW_STEPS(count=steps, fewest=FEW_STEPS))
    if not entry.held:
        warnings.append(Warn.NO_SLOPE())
    return warnings


def _of_records(entry: ConfigEntry) -> list[RunWarning]:
    warnings, records = [], entry.records
    missing, steps = records["engine_without_worker"], records["engine_steps"]
    if missing > MISSING_SHARE * steps:
        warnings.append(Warn.NO_WORKER_RECORDS(missing=missing, steps=steps))
    if torn := records["torn_lines"]:
        warnings.append(Warn.TORN_TRIAL(count=torn))
    return warnings


def _of_requests(entry: ConfigEntry) -> list[RunWarning]:
    requests, lag = entry.requests, entry.lag_ms
    scheduled = requests["scheduled"]
    warnings = [
        Warn.REQUESTS_LOST(count=requests[how], scheduled=scheduled, how=how)
        for how in ("failed", "cancelled")
        if requests[how]
    ]
    if scheduled != sum(requests[k] for k in ("ok", "failed", "cancelled")):
        warnings.append(Warn.NOT_RECONCILED())
    if lag and not lag["valid"]:
        warnings.append(Warn.SENT_LATE(p99=lag["p99"], budget=lag["budget"]))
    return warnings


def interrupted_share(steps: pl.DataFrame) -> float:
    """Share of steps longer than SLOW_TIMES the median of their batch size."""
    median = pl.col("step_us").median().alias("usual")
    usual = steps.lazy().group_by("batch").agg(median)
    share = (
        steps.lazy()
        .select("batch", "step_us")
        .join(usual, on="batch")
        .select((pl.col("step_us") > SLOW_TIMES * pl.col("usual")).mean())
        .collect()
        .item()
    )
    return float(share or 0.0)


def run_warnings(run: RunRecord, roles: Roles, noise: NoiseFloor) -> list[RunWarning]:
    """Warn of what makes the run as a whole doubtful."""
    warnings = []
    if run.provenance.get("git_dirty"):
        warnings.append(Warn.UNCOMMITTED())
    if noise.pair is None:
        warnings.append(Warn.NO_NOISE_FLOOR())
    for role in ("baseline", "twin", "floor"):
        if len(names := roles.named(role)) > 1:
            warnings.append(Warn.ROLE_TWICE(names=", ".join(names), role=role))
    for metric, apart in (noise.p50_us or {}).items():
        low, high = apart.ci95 or (0.0, 0.0)
        if low > 0 or high < 0:
            pair = " and ".join(noise.pair or ())
            warnings.append(Warn.EQUALS_DIFFER(pair=pair, metric=metric, apart=apart))
    return warnings
