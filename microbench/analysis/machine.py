# SPDX-License-Identifier: Apache-2.0
"""How much of the machine's slowness each part of a step shows, found in the run.

What slows vLLM's output thread (microbench.analysis.speed) slows the scheduler as much
where the whole machine is slower, and less where a neighbour takes a core now and then.
To divide by too much adds the noise that should go. So each part is divided by the
slowness to that power, of SHARES, with which the falls at the resets of one config
differ least from each other. How large the falls are has no say in it, nor have servers
that were measured after the first look at the verdicts: a decision stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from microbench.analysis.growth import Reset
from microbench.analysis.metrics import METRICS, PARTS, Metric

# The first of equals is taken.
SHARES = (1.0, 0.5, 0.0)
# A twentieth of the margin: what differs by less is not noise that matters.
LEAST_US_PER_1K_BLOCKS = 0.1


def metrics_here(resets: Sequence[Reset], repeats: int) -> dict[str, Metric]:
    """METRICS, with how much of the slowness each shows in the run of `resets`.

    Of each config the first `repeats` servers are asked.
    """
    return {
        name: _with_least_scatter(metric, resets, repeats) if name in PARTS else metric
        for name, metric in METRICS.items()
    }


def _with_least_scatter(
    metric: Metric, resets: Sequence[Reset], repeats: int
) -> Metric:
    candidates = [replace(metric, slowness_share=share) for share in SHARES]
    return min(candidates, key=lambda one: _scatter(one, resets, repeats))


def _scatter(metric: Metric, resets: Sequence[Reset], repeats: int) -> float:
    """The logarithm of the variance of a config's falls, summed over the configs."""
    variances = [
        np.var(found, ddof=1)
        for reset in resets
        if len(found := reset.each_fall(metric, repeats)) > 1
    ]
    return sum(np.log(one + LEAST_US_PER_1K_BLOCKS**2) for one in variances)
