# SPDX-License-Identifier: Apache-2.0
"""What a run should make its reader suspicious of, one sentence each."""

from __future__ import annotations

import polars as pl

from lab.records.per_config import ConfigEntry, NoiseFloor
from lab.records.run import RunRecord
from microbench.analysis.levels import MAX_STEPS, thin
from microbench.analysis.roles import Roles
from microbench.analysis.verdict import MARGIN_US_PER_1K_BLOCKS

FEW_STEPS = 200
# A step that takes this many times the median of its batch size was interrupted.
SLOW_TIMES = 5
SLOW_SHARE = 0.01
MISSING_SHARE = 0.01


def config_warnings(entry: ConfigEntry, steps: pl.DataFrame) -> list[str]:
    """Reasons to doubt the numbers of one config."""
    found = []
    if entry.error:
        found.append(f"some trials failed and are left out: {entry.error}")
    if entry.n_repeats == 1:
        found.append(
            "one repeat: a neighbour that slows the machine between growth and reset "
            "cannot be told from growth"
        )
    if entry.n_window_steps < FEW_STEPS:
        found.append(
            f"{entry.n_window_steps} decode-only steps at the stated |cache| "
            f"(fewer than {FEW_STEPS})"
        )
    for metric, slope in entry.slope_us_per_1k_blocks.items():
        if slope is None:
            found.append(f"too few decode-only steps in growth for a {metric} slope")
            continue
        half = (slope["ci95"][1] - slope["ci95"][0]) / 2
        if half > MARGIN_US_PER_1K_BLOCKS and half > 0.1 * abs(slope["value"]):
            found.append(f"wide interval: the {metric} slope is known to +-{half:.1f}")
    if entry.reset_check is None:
        found.append("no comparable steps around a prefix-cache reset")
    records, requests = entry.records, entry.requests
    missing = records["engine_without_worker"]
    if missing > MISSING_SHARE * records["engine_steps"]:
        steps_read = records["engine_steps"]
        found.append(f"{missing} of {steps_read} steps lack worker records")
    if records["torn_lines"]:
        found.append(f"{records['torn_lines']} torn last lines were dropped")
    for what in ("failed", "cancelled"):
        if requests[what]:
            found.append(f"{requests[what]} of {requests['scheduled']} requests {what}")
    if requests["scheduled"] != sum(requests[k] for k in ("ok", "failed", "cancelled")):
        found.append("requests do not reconcile")
    lag = entry.lag_ms
    if lag and not lag["valid"]:
        found.append(
            f"the driver sent late: lag p99 {lag['p99']} ms, budget {lag['budget']} ms"
        )
    share = interrupted_share(thin(steps, MAX_STEPS))
    if share > SLOW_SHARE:
        found.append(
            f"{share:.1%} of the steps took over {SLOW_TIMES} times the median of "
            "their batch size: the cores were shared or stolen"
        )
    return found


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


def run_warnings(run: RunRecord, roles: Roles, noise: NoiseFloor) -> list[str]:
    """Reasons to doubt the run as a whole."""
    found = []
    if run.provenance.get("git_dirty"):
        found.append("the run was made from a tree with uncommitted changes")
    if noise.pair is None:
        found.append("no A/A pair: differences have no noise floor")
    for role in ("baseline", "twin", "floor"):
        if len(names := roles.named(role)) > 1:
            found.append(f"{', '.join(names)} have the role {role}: the first counts")
    for metric, slope in (noise.slope_us_per_1k_blocks or {}).items():
        if slope["floor"] > MARGIN_US_PER_1K_BLOCKS:
            found.append(
                f"the A/A pair differs by up to {slope['floor']:.1f} us per 1,000 "
                f"blocks in {metric}: smaller slopes are noise"
            )
    return found
