# SPDX-License-Identifier: Apache-2.0
"""What may grow with |cache|: which time, of which steps, and which middle of it.

A median over decode-only steps is what a token waits for, and a machine that stalls
hardly moves it. It cannot see a cost that fewer than half of the steps pay. So means
must pass as well: of CPU time, which a stall does not lengthen, and of the connector's
calls, which are so short that few stalls hit them. Because prompts enter the cache in
steps that prefill, those count, too, and by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.stats.mean_slope import BLOCK_STEPS

Steps = Literal["decode_only", "prefills", "all"]


@dataclass(frozen=True)
class Metric:
    """`time` is a column of microbench.analysis.steps.

    A mean's slope is fitted to blocks of so many of its steps. A metric that only
    vetoes must not grow, but need not be flat.
    """

    time: str
    steps: Steps
    middle: Literal["median", "mean"]
    block_steps: int = BLOCK_STEPS
    only_vetoes: bool = False


# Those with a level, too: what scheduler and connector take, and all there is.
LEVELS = {
    "schedule": Metric("schedule_us", "decode_only", "median"),
    "overhead": Metric("overhead_us", "decode_only", "median"),
    # It holds the model, whose noise can pass for growth.
    "step": Metric("step_us", "decode_only", "median", only_vetoes=True),
}
METRICS = LEVELS | {
    "scheduler_cpu": Metric("scheduler_cpu_us", "decode_only", "mean"),
    "connector": Metric("connector_us", "all", "mean"),
    # Few, and too far apart to resemble each other.
    "prefill": Metric("connector_us", "prefills", "mean", block_steps=2),
    # One value per sample of the threads.
    "threads": Metric("threads_us", "all", "mean", block_steps=1),
}
