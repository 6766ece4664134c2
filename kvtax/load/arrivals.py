# SPDX-License-Identifier: Apache-2.0
"""When each request is due. A pure function of the plan, so a seed is a schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtax.load.plan import Phase, Plan

# First word of the seed: keeps arrivals and prompts independent of each other.
ARRIVALS, PROMPTS, PROBE = 0, 1, 2


class Timetable(NamedTuple):
    """Due times of one phase, in ns after its start, and when the next phase starts."""

    phase: Phase
    due_ns: list[int]
    length_ns: int


def timetables(plan: Plan) -> list[Timetable]:
    """One timetable a phase: gaps of 1/rate, exponential with that mean if Poisson."""
    rng = np.random.default_rng([ARRIVALS, plan.seed])
    return [_timetable(phase, plan.arrival, rng) for phase in plan.phases]


def _timetable(phase: Phase, arrival: str, rng: np.random.Generator) -> Timetable:
    mean_ns = 1e9 / phase.rate_rps
    if arrival == "poisson":
        gaps_ns = rng.exponential(mean_ns, phase.requests)
    else:
        gaps_ns = np.full(phase.requests, mean_ns)
    ends_ns = np.cumsum(gaps_ns)
    due_ns = np.concatenate(([0.0], ends_ns[:-1])).astype(np.int64).tolist()
    return Timetable(phase, due_ns, int(ends_ns[-1]))
