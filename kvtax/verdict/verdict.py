# SPDX-License-Identifier: Apache-2.0
"""Verdict on whether a step's cost grows with |cache|, and in which shape.

Of each metric (kvtax/verdict/metrics.py) the levels are known at which |cache| was held
(kvtax/stats/held.py). The margin, in us per 1,000 blocks, times the range of |cache| is
what a level may lie above a lower one and still be flat.

- grows: a level lies above a lower one, or the straight line rises, by more than the
  margin for certain. All pairs of levels are tested at once, so it need not be a line.
- drifts: it rises from pass to pass by more than that, and not with the level, be it
  in rare steps alone: something else went up, such as all that was ever stored.
- flat: for each pair of levels it is excluded that the upper one lies above the lower
  one by the margin or more, on average over all steps, rare ones too. A cost that
  falls with |cache| is flat.
- inconclusive: none of these.

The config's verdict:

- grows: a part, the sum of the parts, schedule or overhead grows;
- drifts: a part drifts. In a whole it may be the machine;
- flat: all parts that were measured, and their sum, are flat, and no whole grows;
- inconclusive: anything else. A step that grows while nothing else does is that, too:
  it also holds the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtax.records.per_config import HeldLevels
from kvtax.records.run import Verdict
from kvtax.stats.held import Fit, falls, growth, most_rise_us
from kvtax.verdict.measured import Fits
from kvtax.verdict.metrics import (
    ALL_PARTS,
    MARGIN_US_PER_1K_BLOCKS,
    PART_METRICS,
    margin_of,
)

# A part that rises by more than so many margins from pass to pass is not flat.
DRIFT_MARGINS = 3
RARE = "rare"


@dataclass(frozen=True)
class Judged:
    """Verdict on a metric; `shape` says how it grows, or what keeps it from flat.

    RARE: only the mean over all steps shows it.
    """

    verdict: Verdict
    shape: str | None = None


def judge_metric(
    fits: Fits, level: float, margin: float = MARGIN_US_PER_1K_BLOCKS
) -> Judged:
    """Judge one metric; intervals hold in `level` of runs."""
    usual, mean = fits.usual, fits.mean
    margin_us = margin * _range_1k(usual)
    if (shape := growth(usual, margin_us, level)) is not None:
        return Judged("grows", shape)
    if mean is not None and growth(mean, margin_us, level) is not None:
        return Judged("grows", RARE)
    by_steps = ((usual, None), (mean, RARE))
    known = [(found, which) for found, which in by_steps if found is not None]
    for found, which in known:
        if found.drift(level)[0] > margin_us:
            return Judged("drifts", which)
    for found, which in known:
        still = found.drift(level)[1] < DRIFT_MARGINS * margin_us
        if most_rise_us(found, level) >= margin_us or not still:
            return Judged("inconclusive", which)
    return Judged("flat", "falls" if falls(usual, margin_us, level) else None)


def judge_all(fits: Mapping[str, Fits], level: float) -> dict[str, Judged]:
    """Judge every metric, each by its own margin."""
    return {
        name: judge_metric(found, level, margin_of(name))
        for name, found in fits.items()
    }


def _range_1k(found: Fit) -> float:
    return float(found.x[-1] - found.x[0])


def held_levels(found: Fits, level: float, judged: Judged) -> HeldLevels:
    """Tabulate the levels of a metric, and the most that its slope can be."""
    usual = found.usual
    rare_or_usual = found.mean if found.mean and judged.shape == RARE else usual
    bounds = [
        most_rise_us(one, level) for one in (usual, found.mean) if one is not None
    ]
    return HeldLevels(
        cache_blocks=[round(1_000 * x) for x in usual.x],
        us=[round(float(us), 3) for us in usual.level_us],
        mean_us=None
        if found.mean is None
        else [round(float(us), 3) for us in found.mean.level_us],
        most_us_per_1k_blocks=round(max(bounds) / _range_1k(usual), 3),
        drift_us_per_pass=round(rare_or_usual.drift_us, 3),
        shape=judged.shape,
    )


def overall_verdict(of: Mapping[str, Verdict]) -> Verdict:
    """Derive the config's verdict from those of its metrics."""
    parts = [name for name in of if name in PART_METRICS or name == ALL_PARTS]
    if "grows" in (of.get(name) for name in {*parts, "schedule", "overhead"}):
        return "grows"
    if "drifts" in (of.get(name) for name in parts):
        return "drifts"
    flat = bool(parts) and all(of.get(name) == "flat" for name in parts)
    vetoed = "grows" in (of.get("step"), of.get("step_cpu"))
    return "flat" if flat and not vetoed else "inconclusive"
