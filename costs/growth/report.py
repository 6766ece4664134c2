# SPDX-License-Identifier: Apache-2.0
"""What each fix changes, before and after, against what it grew with."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.stats.interval import Interval
from lab.stats.markdown import table
from lab.stats.rounds import over_rounds, ratio

Floats = NDArray[np.float64]


class Case(NamedTuple):
    """A fix, on a vLLM release, with so many running requests of such a length."""

    patch: str
    release: str
    running_requests: int
    context_tokens: int


# By case, us: (rounds, 2, steps), before and after the fix.
Samples = dict[Case, Floats]


class Row(msgspec.Struct):
    """Medians over all steps; `before_times_after` compares rounds."""

    patch: str
    release: str
    running_requests: int
    context_tokens: int
    rounds: int
    steps: int
    before_us: Interval
    after_us: Interval
    before_times_after: Interval


def rows(samples: Samples) -> list[Row]:
    found = []
    for case, times_us in samples.items():
        before, after = times_us[:, 0], times_us[:, 1]
        medians = np.median(before, axis=1), np.median(after, axis=1)
        found.append(
            Row(
                *case,
                len(times_us),
                before.size,
                before_us=Interval.of(over_rounds(before)),
                after_us=Interval.of(over_rounds(after)),
                before_times_after=Interval.of(ratio(*medians)),
            )
        )
    return found


def report(found: list[Row]) -> str:
    head = ["fix", "vLLM", "running", "context, tokens", "before, us", "after, us"]
    body = [
        [
            f"`{row.patch}`",
            row.release,
            f"{row.running_requests:,}",
            f"{row.context_tokens:,}",
            f"{row.before_us:,.1f}",
            f"{row.after_us:,.1f}",
            f"{row.before_times_after:,.2f}",
            f"{row.steps:,}",
        ]
        for row in found
    ]
    return table([*head, "before / after", "steps"], body)
