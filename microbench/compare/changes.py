# SPDX-License-Identifier: Apache-2.0
"""What changed from one run to another, beyond what both know of their own noise.

The machine's speed drifts from run to run. The baseline is in both, so a level counts
as a multiple of the baseline's, and a slope is divided by what the baseline got slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.interval import Interval
from microbench.compare.comparable import other_machine, other_window, speed
from microbench.compare.numbers import baseline_of, p50_us, slope

# What is more costly; *inconclusive* is not in the order.
SEVERITY = {"flat": 0, "drifts": 1, "grows": 2, "failed": 3}


@dataclass(frozen=True)
class Change:
    """One metric of one config. `slope` is NEW less OLD, in us per 1,000 blocks;
    `times_old` is NEW's p50 over OLD's. None: cannot be compared."""

    config: str
    metric: str
    slope: Interval | None
    times_old: Interval | None
    slope_changed: bool
    level_changed: bool


def change(old: PerConfig, new: PerConfig, name: str, metric: str) -> Change:
    """What became of `metric` of the config `name`, which both runs measured."""
    factor = speed(old, new, metric) or 1.0
    machine = other_machine(old, new)
    slopes = None if machine else _slope_change(old, new, name, metric, factor)
    times_old = None
    if not machine and not other_window(old, new):
        times_old = _times_old(old, new, name, metric, factor)
    floor = max(d.noise_floor.slope_floor(metric) for d in (old, new))
    return Change(
        name,
        metric,
        slopes,
        times_old,
        bool(slopes and _excludes(slopes, 0) and abs(slopes.value) > floor),
        bool(times_old and _excludes(times_old, 1)),
    )


def got_worse(old: ConfigEntry, new: ConfigEntry) -> bool:
    """Whether NEW's verdict says of a cost what OLD's did not."""
    return SEVERITY.get(new.verdict, 0) > SEVERITY.get(old.verdict, 0)


def _slope_change(
    old: PerConfig, new: PerConfig, name: str, metric: str, factor: float
) -> Interval | None:
    before, after = (slope(d.configs[name], metric) for d in (old, new))
    if before is None or after is None:
        return None
    value = after.value / factor - before.value
    low = hypot((after.value - after.ci95[0]) / factor, before.ci95[1] - before.value)
    high = hypot((after.ci95[1] - after.value) / factor, before.value - before.ci95[0])
    return Interval(value, (value - low, value + high))


def _times_old(
    old: PerConfig, new: PerConfig, name: str, metric: str, factor: float
) -> Interval | None:
    if name == baseline_of(new) == baseline_of(old):
        # What the others are measured by: the speed itself.
        return None
    before, after = (p50_us(d, name, metric) for d in (old, new))
    if before is None or after is None:
        return None
    value = after.value / before.value / factor
    low = hypot(
        (after.value - after.ci95[0]) / after.value,
        (before.ci95[1] - before.value) / before.value,
    )
    high = hypot(
        (after.ci95[1] - after.value) / after.value,
        (before.value - before.ci95[0]) / before.value,
    )
    return Interval(value, (value * (1 - low), value * (1 + high)))


def _excludes(interval: Interval, value: float) -> bool:
    low, high = interval.ci95
    return not low <= value <= high
