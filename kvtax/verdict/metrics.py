# SPDX-License-Identifier: Apache-2.0
"""Metrics that may grow with |cache|: what of a step, in which steps of a hold.

`timed` is what scheduler and connector take of a step: schedule(), update_from_output()
and the connector's calls in the worker. Most tokens wait for it. `timed_many` is the
same with many requests, `prefill` the connector's calls in steps with prefill. What
runs beside the step is CPU time: `threads` of the engine's process that are not vLLM's
own, and all `processes` of the server. `step` is the whole step, the model too.

Values are means without the slowest tenth of the steps, which stalls of the machine and
rare costs are in; of `timed`, costs in fewer steps are counted (kvtax.verdict.rare).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# 35 us at 17,500 blocks, 0.5 % of a 7 ms forward.
MARGIN_US_PER_1K_BLOCKS = 2.0
Steps = Literal["decode_only", "prefills", "all"]


@dataclass(frozen=True)
class Metric:
    """`time` is a column of kvtax.steps.trial_steps, or `of` one of CPU times.

    A hold with fewer of its steps than `least_steps` has no value. Growth by less than
    the margin is no growth.
    """

    time: str
    steps: Steps = "all"
    least_steps: int = 10
    many: bool = False
    margin_us_per_1k_blocks: float = MARGIN_US_PER_1K_BLOCKS


def number(found: object) -> float:
    """Convert an aggregate of a polars column to a float; 0 for an empty column."""
    return float(found) if isinstance(found, int | float) else 0.0


# Metrics that also get a level (time at a fixed |cache|), as medians.
LEVELS = {
    "schedule": Metric("schedule_us", "decode_only"),
    "overhead": Metric("overhead_us", "decode_only"),
    "step": Metric("step_us", "decode_only"),
}
# Between tokens of a request, as its client sees them.
TPOT = "tpot"
TIMED, TIMED_MANY, PREFILL, RARE = "timed", "timed_many", "prefill", "rare"
THREADS, PROCESSES = "threads", "processes"
OF_STEPS = {
    TIMED: Metric("overhead_us"),
    # Such a step takes twice as long, and more.
    TIMED_MANY: Metric("overhead_us", many=True, margin_us_per_1k_blocks=4.0),
    # The margin is 175 us at 17,500 blocks: 0.2 % of a prompt's 100 ms.
    PREFILL: Metric("connector_us", "prefills", 1, margin_us_per_1k_blocks=10.0),
}
# CPU time beside the step, one value a hold.
OF_CPU = (THREADS, PROCESSES)
METRICS = LEVELS | OF_STEPS
# All that have a verdict.
JUDGED = (*OF_STEPS, THREADS, PROCESSES, *LEVELS)
# Flat rests on these: what was timed. A bound on the others is stated beside it.
DECISIVE = (*OF_STEPS, THREADS)


def margin_of(name: str) -> float:
    """Return the margin of a metric in us per 1,000 blocks."""
    metric = METRICS.get(name)
    return metric.margin_us_per_1k_blocks if metric else MARGIN_US_PER_1K_BLOCKS
