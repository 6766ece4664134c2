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

Steps = Literal["decode_only", "prefills", "all"]


@dataclass(frozen=True)
class Metric:
    """`time` is a column of microbench.analysis.steps.

    A metric that does not decide can only veto the verdict "flat".
    """

    time: str
    steps: Steps
    middle: Literal["median", "mean"]
    decides: bool = True


# Those with a level, too: what scheduler and connector take, and all there is.
LEVELS = {
    "schedule": Metric("schedule_us", "decode_only", "median"),
    "overhead": Metric("overhead_us", "decode_only", "median"),
    # It holds the model, whose noise can pass for growth.
    "step": Metric("step_us", "decode_only", "median", decides=False),
}
METRICS = LEVELS | {
    "scheduler_cpu": Metric("scheduler_cpu_us", "decode_only", "mean"),
    "connector": Metric("connector_us", "all", "mean"),
    "prefill": Metric("connector_us", "prefills", "mean"),
    "threads": Metric("threads_us", "all", "mean"),
}
