# SPDX-License-Identifier: Apache-2.0
"""Verdict on whether a step's cost grows with |cache|, and in which shape.

Of each metric (kvtax/verdict/metrics.py) the levels are known at which |cache| was held
(kvtax/stats/held.py). The margin, in us per 1,000 blocks, times the range of |cache| is
what a level may lie above a lower one and still be flat.

- grows: a level lies above a lower one, or the straight line rises, by more than the
  margin for certain. All pairs of levels are tested at once, so it need not be a line.
- drifts: it rises by more than that from pass to pass, or with the time since the last
  reset, and not with the level: something else went up, such as all that was ever
  stored.
- flat: for each pair of levels it is excluded that the upper one lies above the lower
  one by the margin or more. A cost that falls with |cache| is flat.
- inconclusive: none of these.

The config's verdict:

- grows: any metric grows, or long steps come more often at higher levels;
- drifts: one of the DECISIVE drifts;
- flat: all of the DECISIVE that the run should have are there, and flat. What else was
  measured has a bound beside it;
- inconclusive: anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import HeldLevels, RareSteps
from kvtax.records.run import Verdict
from kvtax.stats.held import Fit, falls, growth, most_rise_us
from kvtax.verdict.holds import CHANCE
from kvtax.verdict.metrics import DECISIVE, MARGIN_US_PER_1K_BLOCKS, RARE, margin_of

# A part that rises by more than so many margins from pass to pass is not flat.
DRIFT_MARGINS = 3
AGE = "age"


@dataclass(frozen=True)
class Judged:
    """Verdict on a metric; `shape` says how it grows, or that it falls, or ages."""

    verdict: Verdict
    shape: str | None = None


def judge_metric(
    found: Fit, level: float, margin: float = MARGIN_US_PER_1K_BLOCKS
) -> Judged:
    """Judge one metric; intervals hold in `level` of runs."""
    margin_us = margin * _range_1k(found)
    if (shape := growth(found, margin_us, level)) is not None:
        return Judged("grows", shape)
    for which, (least_us, _) in {
        None: found.drift(level),
        AGE: found.aging(level),
    }.items():
        if least_us > margin_us:
            return Judged("drifts", which)
    # What rises with the age is in the levels, unless it is told from them.
    still = found.drift(level)[1] < DRIFT_MARGINS * margin_us
    if most_rise_us(found, level) >= margin_us or not still:
        return Judged("inconclusive")
    return Judged("flat", "falls" if falls(found, margin_us, level) else None)


def judge_all(fits: Mapping[str, Fit], level: float) -> dict[str, Judged]:
    """Judge every metric, each by its own margin."""
    return {
        name: judge_metric(found, level, margin_of(name))
        for name, found in fits.items()
    }


def judge_rare(rare: RareSteps | None) -> dict[str, Judged]:
    """Judge the long steps, where they were counted."""
    if rare is None:
        return {}
    return {RARE: Judged("grows", RARE) if rare.chance < CHANCE else Judged("flat")}


def _range_1k(found: Fit) -> float:
    return float(found.x[-1] - found.x[0])


def held_levels(found: Fit, level: float, judged: Judged) -> HeldLevels:
    """Tabulate the levels of a metric, and what a full cache adds."""
    rise, error = found.rise(0, len(found.x) - 1)
    reach = found.reach(error, level)
    most_us = most_rise_us(found, level)
    return HeldLevels(
        cache_blocks=[round(1_000 * x) for x in found.x],
        us=[round(float(us), 3) for us in found.level_us],
        full_adds_us=Estimate(
            round(rise, 3), (round(rise - reach, 3), round(rise + reach, 3))
        ),
        most_us=round(most_us, 3),
        most_us_per_1k_blocks=round(most_us / _range_1k(found), 3),
        drift_us_per_pass=round(found.drift_us, 3),
        age_us=None if found.age_us is None else round(found.age_us, 3),
        shape=judged.shape,
    )


def overall_verdict(of: Mapping[str, Verdict], promised: Collection[str]) -> Verdict:
    """Derive the config's verdict from those of its metrics.

    `promised` are those of the DECISIVE that the run should have.
    """
    if "grows" in of.values():
        return "grows"
    decisive = [of[name] for name in DECISIVE if name in of]
    if "drifts" in decisive:
        return "drifts"
    whole = bool(decisive) and set(promised) <= of.keys()
    return "flat" if whole and set(decisive) == {"flat"} else "inconclusive"
