# SPDX-License-Identifier: Apache-2.0
"""Configs of one run against one another: the noise floor, the baseline, the floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.records.per_config import ConfigEntry, NoiseFloor, Stated
from lab.stats.estimate import Estimate
from lab.stats.interval import stated
from microbench.analysis.latency import tpot_addition
from microbench.analysis.measured import Measured
from microbench.analysis.metrics import LEVELS
from microbench.analysis.roles import Roles


def noise_floor(measured: Mapping[str, Measured], roles: Roles) -> NoiseFloor:
    """How far the baseline and its twin are apart, in slope and in level."""
    if roles.baseline not in measured or roles.twin not in measured:
        return NoiseFloor()
    first, second = measured[roles.baseline], measured[roles.twin]
    slopes = _apart(first.slopes, second.slopes)
    falls = _apart(first.falls, second.falls)
    levels = _apart(first.p50, second.p50)
    pair = (first.name, second.name)
    return NoiseFloor(pair, slopes or None, falls or None, levels or None)


def _apart(
    first: Mapping[str, Estimate | None], second: Mapping[str, Estimate | None]
) -> dict[str, Stated]:
    """By metric, the difference and how large it is."""
    found = {}
    for metric, a in first.items():
        b = second.get(metric)
        if a is not None and b is not None:
            difference = b.minus(a)
            floor = {"floor": round(abs(difference.value), 3)}
            found[metric] = (stated(difference, 3) or {}) | floor
    return found


def compare_with_baseline(
    entries: Mapping[str, ConfigEntry],
    measured: Mapping[str, Measured],
    baseline: str | None,
    noise: NoiseFloor,
    own_forward_ms: float,
) -> None:
    """Fill in `vs_plain` and `tpot_addition` of the other measured configs."""
    if baseline not in measured:
        return
    base = measured[baseline]
    for name, one in measured.items():
        if one is not base:
            entry = entries[name]
            entry.vs_plain = _differences(one, base, noise) or None
            entry.tpot_addition = tpot_addition(
                entries[baseline], entry, own_forward_ms
            )


def _differences(one: Measured, base: Measured, noise: NoiseFloor) -> dict[str, Any]:
    """Difference of p50, by metric; smaller than the noise floor is within noise."""
    found = {}
    for metric in LEVELS:
        ours, theirs = one.p50.get(metric), base.p50.get(metric)
        if ours is not None and theirs is not None:
            difference = ours.minus(theirs)
            low, high = difference.ci95
            small = abs(difference.value) <= noise.p50_floor(metric)
            found[metric] = (stated(difference, 3) or {}) | {
                "within_noise": low <= 0 <= high or small
            }
    return found


def compare_with_floor(
    entries: Mapping[str, ConfigEntry],
    measured: Mapping[str, Measured],
    floor: str | None,
) -> None:
    """Fill in `vs_noop` of the other measured configs."""
    if floor not in measured:
        return
    base = measured[floor]
    for name, one in measured.items():
        if one is not base:
            entries[name].vs_noop = _ratios(one, base) or None


def _ratios(one: Measured, base: Measured) -> dict[str, Any]:
    """Ratio of p50, by metric."""
    found = {}
    for metric in LEVELS:
        ours, theirs = one.p50.get(metric), base.p50.get(metric)
        if ours is not None and theirs is not None:
            found[metric] = stated(ours.over(theirs), 3)
    return found
