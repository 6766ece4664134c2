# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run and its configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import polars as pl

from kvtax.records.per_config import ConfigEntry, NoiseFloor
from kvtax.records.run import RunRecord
from kvtax.records.warning import RunWarning
from kvtax.stats import Estimate
from kvtax.stats.distribution import Distribution
from kvtax.verdict.levels import MAX_STEPS, thin
from kvtax.verdict.metrics import (
    ALL_PARTS,
    MARGIN_US_PER_1K_BLOCKS,
    PART_METRICS,
    margin_of,
)
from kvtax.verdict.roles import Roles

Kind = Literal[
    "trials_failed",
    "few_steps",
    "no_slope",
    "undecided",
    "growth_alone",
    "no_worker_records",
    "torn_lines",
    "requests_lost",
    "not_reconciled",
    "sent_late",
    "interrupted",
    "uncommitted",
    "no_noise_floor",
    "high_noise_floor",
    "role_twice",
]
_QUIETER = "stop what else runs on the machine, or use one whose cores are not shared"
REMEDIES: dict[Kind, str] = {
    "trials_failed": "Read their server.log and driver.log; a sweep with `--out` and "
    "`--resume` makes only them again.",
    "few_steps": "Hold the levels for longer (`output_tokens` of the ladder).",
    "no_slope": "Add passes to the ladder.",
    "undecided": f"Run it with more repeats (`--only`, `--repeats`), or {_QUIETER}.",
    "growth_alone": "If the connector keeps an index that a reset of the prefix cache "
    "does not empty, that was full before the first hold: its cost has no verdict. A "
    "machine that got slower meanwhile looks alike; another server tells.",
    "no_worker_records": "Look in server.log for a worker that died: the overhead of "
    "these steps is not known.",
    "torn_lines": "Look in server.log and driver.log for what killed the writer.",
    "requests_lost": "Read the errors in requests.jsonl: the server had less load than "
    "planned.",
    "not_reconciled": "Make the trial again: requests have no outcome, or two.",
    "sent_late": "Growth and latencies of that trial are left out, not its levels. "
    f"Lower the rate of the load (`rate_rps`), or {_QUIETER}.",
    "interrupted": f"{_QUIETER.capitalize()}.",
    "uncommitted": "Commit and run again: the measured code is not on record.",
    "no_noise_floor": "Run the config with the role `baseline` and the one with the "
    "role `twin` too.",
    "high_noise_floor": f"Add repeats, or {_QUIETER}.",
    "role_twice": "Leave the role to one config of the run.",
}


def doubt(kind: Kind, message: str) -> RunWarning:
    """Make a warning with the remedy of its kind."""
    return RunWarning(kind, "", message, REMEDIES[kind])


def undecided(entry: ConfigEntry) -> list[RunWarning]:
    """Warn of an inconclusive config; its verdict's words have the bounds."""
    if entry.verdict != "inconclusive" or not entry.held:
        return []
    return [doubt("undecided", "its verdict says in what, and by how much")]


def growth_alone(
    entry: ConfigEntry, slopes: Mapping[str, Distribution | None]
) -> list[RunWarning]:
    """Warn if a cost rose while the cache first filled, and not with the levels.

    `slopes` in us per 1,000 blocks are those of the growth phase, by metric.
    """
    if entry.verdict in ("grows", "drifts"):
        return []
    for metric, slope in slopes.items():
        held = entry.held.get(metric)
        if held is None or slope is None:
            continue
        if slope.ci95[0] > max(MARGIN_US_PER_1K_BLOCKS, held.most_us_per_1k_blocks):
            message = (
                f"{metric} rose by {Estimate.of(slope):.1f} us per 1,000 blocks while "
                "the cache filled for the first time, and not with the levels"
            )
            return [doubt("growth_alone", message)]
    return []


def open_metrics(entry: ConfigEntry) -> list[str]:
    """List the parts, or their sum, that are undecided."""
    parts = [name for name in entry.verdict_of if name in (*PART_METRICS, ALL_PARTS)]
    return [name for name in parts if entry.verdict_of.get(name) == "inconclusive"]


def doubtfulness(entry: ConfigEntry) -> float:
    """Compute the largest bound of an undecided part, as a multiple of its margin.

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


def config_warnings(entry: ConfigEntry, steps: pl.DataFrame) -> list[RunWarning]:
    """Reasons to doubt the numbers of one config."""
    found = []
    if entry.error:
        message = f"some trials failed and are left out: {entry.error}"
        found.append(doubt("trials_failed", message))
    return [
        *found,
        *_of_estimates(entry),
        *_of_records(entry),
        *_of_requests(entry),
        *_of_speed(steps),
    ]


def _of_estimates(entry: ConfigEntry) -> list[RunWarning]:
    found = []
    if entry.n_window_steps < FEW_STEPS:
        message = (
            f"{entry.n_window_steps} decode-only steps at the stated |cache| "
            f"(fewer than {FEW_STEPS})"
        )
        found.append(doubt("few_steps", message))
    if not entry.held:
        found.append(doubt("no_slope", "too few holds to know a level"))
    return found


def _of_records(entry: ConfigEntry) -> list[RunWarning]:
    found, records = [], entry.records
    missing, steps = records["engine_without_worker"], records["engine_steps"]
    if missing > MISSING_SHARE * steps:
        message = f"{missing} of {steps} steps lack worker records"
        found.append(doubt("no_worker_records", message))
    if torn := records["torn_lines"]:
        found.append(doubt("torn_lines", f"{torn} torn last lines were dropped"))
    return found


def _of_requests(entry: ConfigEntry) -> list[RunWarning]:
    found, requests = [], entry.requests
    scheduled = requests["scheduled"]
    for what in ("failed", "cancelled"):
        if requests[what]:
            message = f"{requests[what]} of {scheduled} requests {what}"
            found.append(doubt("requests_lost", message))
    if scheduled != sum(requests[k] for k in ("ok", "failed", "cancelled")):
        found.append(doubt("not_reconciled", "requests do not reconcile"))
    lag = entry.lag_ms
    if lag and not lag["valid"]:
        message = (
            f"the driver sent late: lag p99 {lag['p99']} ms, budget {lag['budget']} ms"
        )
        found.append(doubt("sent_late", message))
    return found


def _of_speed(steps: pl.DataFrame) -> list[RunWarning]:
    share = interrupted_share(thin(steps, MAX_STEPS))
    if share <= SLOW_SHARE:
        return []
    message = (
        f"{share:.1%} of the steps took over {SLOW_TIMES} times the median of their "
        "batch size: the cores were shared or stolen"
    )
    return [doubt("interrupted", message)]


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
    """Reasons to doubt the run as a whole."""
    found = []
    if run.provenance.get("git_dirty"):
        message = "the run was made from a tree with uncommitted changes"
        found.append(doubt("uncommitted", message))
    if noise.pair is None:
        message = "no A/A pair: differences have no noise floor"
        found.append(doubt("no_noise_floor", message))
    for role in ("baseline", "twin", "floor"):
        if len(names := roles.named(role)) > 1:
            message = f"{', '.join(names)} have the role {role}: the first counts"
            found.append(doubt("role_twice", message))
    for metric, slope in (noise.slope_us_per_1k_blocks or {}).items():
        if slope.floor > MARGIN_US_PER_1K_BLOCKS:
            message = (
                f"the A/A pair differs by up to {slope.floor:.1f} us per 1,000 "
                f"blocks in {metric}: smaller slopes are noise"
            )
            found.append(doubt("high_noise_floor", message))
    return found
