# SPDX-License-Identifier: Apache-2.0
"""What may grow with |cache|: which time, of which steps, and which middle of it.

Wholes and parts. The wholes (`schedule`, `overhead`, `step`) are what a token waits
for, as medians over decode-only steps. They hold the machine's noise, and a median does
not see what fewer than half of the steps pay. The parts add up to all that a connector
can change: CPU time of the scheduler, which no stall lengthens; the connector's calls,
which are so short that few stalls hit them; and CPU time of other threads. They are
means, and because prompts enter the cache in steps that prefill, those count, too.
"Flat" rests on the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.stats.mean_slope import BLOCK_STEPS

Steps = Literal["decode_only", "prefills", "all"]


@dataclass(frozen=True)
class Metric:
    """`time` is a column of microbench.analysis.steps.

    A mean's slope is fitted to blocks of so many of its steps.
    """

    time: str
    steps: Steps
    middle: Literal["median", "mean"]
    block_steps: int = BLOCK_STEPS


# Those with a level, too.
LEVELS = {
    "schedule": Metric("schedule_us", "decode_only", "median"),
    "overhead": Metric("overhead_us", "decode_only", "median"),
    "step": Metric("step_us", "decode_only", "median"),
}
PARTS = {
    "scheduler_cpu": Metric("scheduler_cpu_us", "decode_only", "mean"),
    "connector": Metric("connector_us", "all", "mean"),
    # Few, and too far apart to resemble each other.
    "prefill": Metric("connector_us", "prefills", "mean", block_steps=2),
    # One value per sample of the threads.
    "threads": Metric("threads_us", "all", "mean", block_steps=1),
}
METRICS = LEVELS | PARTS
