# SPDX-License-Identifier: Apache-2.0
"""Metrics that may grow with |cache|: time, steps, and median or mean.

Wholes and parts. The wholes (`schedule`, `overhead`, `step`) are what a token waits
for, as medians over decode-only steps. They hold the machine's noise, and a median does
not see what fewer than half of the steps pay; `step_cpu` does. The parts add up to all
that a connector can change: CPU time of the scheduler, which no stall lengthens; the
connector's calls, which are so short that few stalls hit them; and CPU time of other
threads. They are means over all steps of a hold, those with arrivals, too. `all_parts`
is their sum. "Flat" rests on the parts and on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# 35 us at 17,500 blocks, 0.5 % of a 7 ms forward.
MARGIN_US_PER_1K_BLOCKS = 2.0
Steps = Literal["decode_only", "prefills", "all"]
# How slow the machine was in a hold, by two works (kvtax.verdict.holds.places).
SLOWNESS = ("slowness", "slowness_of_engine")


@dataclass(frozen=True)
class Metric:
    """`time` is a column of kvtax.steps.trial_steps.

    A hold with fewer of its steps than `least_steps` has no value. Growth by less than
    the margin is no growth. The whole step is not held against what the engine's thread
    does besides: that is a part of it.
    """

    time: str
    steps: Steps
    middle: Literal["median", "mean"]
    least_steps: int = 20
    margin_us_per_1k_blocks: float = MARGIN_US_PER_1K_BLOCKS
    controls: tuple[str, ...] = SLOWNESS


def number(found: object) -> float:
    """Convert an aggregate of a polars column to a float; 0 for an empty column."""
    return float(found) if isinstance(found, int | float) else 0.0


# Metrics that also get a level (time at a fixed |cache|).
LEVELS = {
    "schedule": Metric("schedule_us", "decode_only", "median"),
    "overhead": Metric("overhead_us", "decode_only", "median"),
    "step": Metric("step_us", "decode_only", "median", controls=SLOWNESS[:1]),
}
# The whole step again, where a stall cannot lengthen it.
STEP_CPU = {
    "step_cpu": Metric("thread_cpu_us", "decode_only", "mean", controls=SLOWNESS[:1])
}
PART_METRICS = {
    "scheduler_cpu": Metric("scheduler_cpu_us", "all", "mean"),
    "connector": Metric("connector_us", "all", "mean"),
    # The margin is 175 us at 17,500 blocks: 0.2 % of a prompt's 100 ms.
    "prefill": Metric("connector_us", "prefills", "mean", 3, 10.0),
    # One value per sample of the threads.
    "threads": Metric("threads_us", "all", "mean", 1),
}
# The connector's calls in the scheduler count once, in the scheduler's CPU time.
SUMMED = {
    "scheduler_cpu": PART_METRICS["scheduler_cpu"],
    "worker_calls": Metric("worker_calls_us", "all", "mean"),
    "threads": PART_METRICS["threads"],
}
ALL_PARTS = "all_parts"
METRICS = LEVELS | STEP_CPU | PART_METRICS
# All that have a verdict.
JUDGED = (*METRICS, ALL_PARTS)


def margin_of(name: str) -> float:
    """Return the margin of a metric or of the sum of the parts."""
    if name == ALL_PARTS:
        return MARGIN_US_PER_1K_BLOCKS
    return METRICS[name].margin_us_per_1k_blocks
