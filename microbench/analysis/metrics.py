# SPDX-License-Identifier: Apache-2.0
"""What may grow with |cache|: which time, of which steps, and which middle of it.

Wholes and parts. The wholes (`schedule`, `overhead`, `step`) are what a token waits
for, as medians over decode-only steps. They hold the machine's noise, and a median does
not see what fewer than half of the steps pay; `step_cpu` does. The parts add up to all
that a connector can change: CPU time of the scheduler, which no stall lengthens; the
connector's calls, which are so short that few stalls hit them; and CPU time of other
threads. They are means, and because prompts enter the cache in steps that prefill,
those count, too. "Flat" rests on the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import polars as pl

from lab.stats.mean_slope import BLOCK_STEPS

# 35 us at 17,500 blocks, 0.5 % of a 7 ms forward.
MARGIN_US_PER_1K_BLOCKS = 2.0
Steps = Literal["decode_only", "prefills", "all"]


@dataclass(frozen=True)
class Metric:
    """`time` is a column of microbench.analysis.steps.

    A mean's slope is fitted to blocks of so many of its steps. Only steps that are
    alike in `held` are compared: a growing batch must not pass for a growing cost. Or
    the slope takes it into account that the time rises in what is `beside`.
    Growth by less than the margin is no growth. The time is divided by how slow the
    machine was to the power `slowness_share` (microbench.analysis.machine).
    """

    time: str
    steps: Steps
    middle: Literal["median", "mean"]
    block_steps: int = BLOCK_STEPS
    held: tuple[str, ...] = ("batch",)
    beside: tuple[str, ...] = ()
    margin_us_per_1k_blocks: float = MARGIN_US_PER_1K_BLOCKS
    slowness_share: float = 0.0

    @property
    def group(self) -> pl.Expr:
        """A number for each kind of steps that are compared with each other.

        Steps with prefill are one kind where others count, too: of each batch size
        there are so few that leaving out the rare ones would leave out their cost.
        """
        group = 0 * pl.col("repeat").cast(pl.Int64)
        for place, name in enumerate(self.held):
            group += pl.col(name).cast(pl.Int64) * 2**place
        if self.steps == "all" and "batch" in self.held:
            group = pl.when("prefills").then(-1).otherwise(group)
        return group.alias("group")


# Those with a level, too.
LEVELS = {
    "schedule": Metric("schedule_us", "decode_only", "median"),
    "overhead": Metric("overhead_us", "decode_only", "median"),
    "step": Metric("step_us", "decode_only", "median"),
}
# The whole step again, where a stall cannot lengthen it.
STEP_CPU = {"step_cpu": Metric("thread_cpu_us", "decode_only", "mean")}
PARTS = {
    "scheduler_cpu": Metric("scheduler_cpu_us", "decode_only", "mean"),
    # Each block has some of the few steps that prefill, or in which a request ends: to
    # compare only those of one batch size would leave too few of these.
    "connector": Metric(
        "connector_us", "all", "mean", 200, beside=("batch", "prefills")
    ),
    # They are far apart, so a stall hits few of them. The margin is 175 us at 17,500
    # blocks: 0.2 % of a prompt's 100 ms.
    "prefill": Metric(
        "connector_us", "prefills", "mean", 2, margin_us_per_1k_blocks=10.0
    ),
    # One value per sample of the threads.
    "threads": Metric("threads_us", "all", "mean", 1, ()),
}
METRICS = LEVELS | STEP_CPU | PARTS
