# SPDX-License-Identifier: Apache-2.0
"""What the proxy adds to TTFT and how much it carries, as Markdown tables."""

from __future__ import annotations

import numpy as np

from costs.proxy.targets import BODIES
from lab.stats.interval import Interval
from lab.stats.markdown import table
from lab.stats.rounds import over_rounds

DIRECT = "direct"
# By target and body: one list per round.
Samples = dict[tuple[str, str], list[list[float]]]


def added(samples: Samples, target: str, body: str, percent: float) -> Interval:
    """By how much the target's percentile over all rounds is above direct's."""
    ours, direct = samples[target, body], samples[DIRECT, body]

    def difference(rounds: np.ndarray) -> float:
        high, low = (
            np.percentile(np.concatenate([of[r] for r in rounds]), percent)
            for of in (ours, direct)
        )
        return float(high - low)

    return Interval.of(over_rounds(np.arange(len(ours)), difference))


def added_table(samples: Samples, targets: list[str]) -> str:
    """Of times in ms."""
    rows = []
    for body in BODIES:
        direct = np.percentile(np.concatenate(samples[DIRECT, body]), [50, 99])
        for name in targets:
            n = sum(map(len, samples[name, body]))
            cells = [f"{added(samples, name, body, q):+.2f}" for q in (50, 99)]
            base = f"{direct[0]:.2f}/{direct[1]:.2f}"
            rows.append([name, body, f"{n:,}", base, *cells])
    return table(["", "body", "n", "direct p50/p99", "added p50", "added p99"], rows)


def rates_table(samples: Samples, targets: list[str], column: int) -> str:
    """Median of the rounds and their range, of what LoadGenerator.per_s says."""
    rows = []
    for name in targets:
        cells = []
        for body in BODIES:
            found = [of_round[column] for of_round in samples[name, body]]
            middle = np.median(found)
            cells.append(f"{middle:,.0f} [{min(found):,.0f}, {max(found):,.0f}]")
        rows.append([name, *cells])
    return table(["", *BODIES], rows)
