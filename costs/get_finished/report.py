# SPDX-License-Identifier: Apache-2.0
"""Quantiles of get_finished and of the step, in each case, beside what we aim at."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.stats.aims import Aim, aims_table
from lab.stats.interval import Interval
from lab.stats.markdown import table
from lab.stats.rounds import over_rounds

Floats = NDArray[np.float64]

FLOOR, BEFORE, AFTER = "noop", "mooncake", "short-circuit"
NOTHING_PENDING = "nothing pending"
QUANTILES = {"p50": 0.5, "p99": 0.99}
# For the short circuit where nothing is pending, by quantile.
AIM_US = {"p50": 1.0, "p99": 3.0}


class Case(NamedTuple):
    """A condition under which all variants are measured."""

    name: str
    batch: int
    busy: bool
    # A share of --steps: with a busy thread a step takes a hundred times as long.
    share: float = 1.0


# us by case and variant: (rounds, 2, steps), get_finished and the whole step.
Samples = dict[tuple[Case, str], Floats]


class Row(msgspec.Struct):
    """One variant in one case: quantiles of its steps by name, p50 and p99."""

    case: str
    running_requests: int
    variant: str
    rounds: int
    steps: int
    get_finished_us: dict[str, Interval]
    step_us: dict[str, Interval]


def rows(samples: Samples) -> list[Row]:
    return [
        Row(
            case.name,
            case.batch,
            variant,
            len(times_us),
            times_us[:, 0].size,
            get_finished_us=quantiles(times_us[:, 0]),
            step_us=quantiles(times_us[:, 1]),
        )
        for (case, variant), times_us in samples.items()
    ]


def quantiles(times_us: Floats) -> dict[str, Interval]:
    """Of all steps of `times_us`, (rounds, steps); rounds are resampled whole."""
    return {
        name: Interval.of(over_rounds(times_us, lambda of, q=q: np.quantile(of, q)))
        for name, q in QUANTILES.items()
    }


def report(found: list[Row]) -> str:
    """A Markdown table of all cases, and one against the aims."""
    head = ["case", "running", "connector", "steps"]
    head += ["get_finished p50 us", "p99", "step p50 us", "p99"]
    body = [
        [row.case, str(row.running_requests), row.variant, f"{row.steps:,}"]
        + [in_us(q) for q in (*row.get_finished_us.values(), *row.step_us.values())]
        for row in found
    ]
    aims = [
        (
            Aim(
                what=f"{AFTER}, {row.running_requests} running: get_finished {name}",
                at_most=aim_us,
                unit="us",
            ),
            row.get_finished_us[name],
        )
        for row in found
        if row.variant == AFTER and row.case == NOTHING_PENDING
        for name, aim_us in AIM_US.items()
    ]
    return f"{table(head, body)}\n\n{aims_table(aims, '.2f')}"


def in_us(quantile: Interval) -> str:
    return f"{quantile:,.{2 if quantile.value < 10 else 1}f}"
