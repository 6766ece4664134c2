# SPDX-License-Identifier: Apache-2.0
"""Whether two runs can be compared, and what about them cannot."""

from __future__ import annotations

from typing import Any

from lab.records.per_config import PerConfig
from microbench.compare.numbers import baseline_of, baseline_p50_us, metrics_of

# What a profile is called, and how much was measured. All else changes the numbers.
HARMLESS = {"name", "summary", "configs", "repeats", "most_repeats", "minutes"}
MACHINE = ("cpu_model", "cpu_count", "gpu_model")
# Levels are stated at |cache| within 5 %, in one mix of batch sizes.
SAME_CACHE = 0.05
SAME_MIX = 0.9
# Beyond this the baseline itself says that the machines were not alike.
SAME_SPEED = 1.5


class NotComparable(Exception):
    """The two runs measured different things; the message says which."""


def require_same_profile(old: PerConfig, new: PerConfig) -> None:
    """Raises NotComparable, naming each setting that differs."""
    before, after = _settings(old.profile), _settings(new.profile)
    differing = [
        f"{key}: {before[key]!r} and {after[key]!r}"
        for key in before
        if key in after and before[key] != after[key]
    ]
    if differing:
        raise NotComparable(
            "OLD and NEW were measured with different profiles "
            f"({'; '.join(differing)}): measure both with the same one"
        )


def other_machine(old: PerConfig, new: PerConfig) -> str | None:
    """Why times of the two runs are not of one kind of machine."""
    differing = [
        f"{key} {old.provenance.get(key)!r} and {new.provenance.get(key)!r}"
        for key in MACHINE
        if old.provenance.get(key) != new.provenance.get(key)
    ]
    if not differing:
        return None
    return f"different machines, {'; '.join(differing)}"


def other_window(old: PerConfig, new: PerConfig) -> str | None:
    """Why the levels of the two runs are not levels of the same thing."""
    if old.window is None or new.window is None:
        return "not both runs state levels"
    before, after = old.window.at_cache_blocks, new.window.at_cache_blocks
    if abs(after - before) > SAME_CACHE * before:
        return f"levels are at {before:,} cached blocks in OLD, {after:,} in NEW"
    mixes = old.window.batch_mix, new.window.batch_mix
    shared = sum(min(mixes[0][size], mixes[1].get(size, 0.0)) for size in mixes[0])
    if shared < SAME_MIX:
        return f"levels are of other batch sizes: {shared:.0%} in common"
    return None


def speed(old: PerConfig, new: PerConfig, metric: str) -> float | None:
    """How many times longer the baseline takes in NEW; None without one in both.

    A metric without a level takes the first one's that has.
    """
    if baseline_of(old) != baseline_of(new):
        return None
    for one in (metric, *metrics_of([old, new])):
        before, after = (baseline_p50_us(document, one) for document in (old, new))
        if before is not None and after is not None:
            return after / before
    return None


def doubts(old: PerConfig, new: PerConfig) -> list[str]:
    """What a reader must know before believing a comparison."""
    found = []
    if machine := other_machine(old, new):
        found.append(
            f"No time is compared with OLD: {machine}. Measure OLD again on NEW's "
            "machine, or limit what NEW alone tells (`times_baseline`, `times_floor`, "
            "`slope_us_per_1k_blocks`)."
        )
    if window := other_window(old, new):
        found.append(f"No level is compared with OLD: {window}.")
    before, after = _settings(old.profile), _settings(new.profile)
    if only_one := sorted(set(before) ^ set(after)):
        found.append(f"Only one of the two profiles has {', '.join(only_one)}.")
    factors = {metric: speed(old, new, metric) for metric in metrics_of([old, new])}
    if None in factors.values():
        found.append(
            "There is no baseline in both runs, so a slower machine cannot be told "
            "from a slower connector."
        )
    for metric, factor in factors.items():
        own = baseline_p50_us(new, metric) is not None
        if own and factor and not 1 / SAME_SPEED <= factor <= SAME_SPEED:
            found.append(
                f"`{metric}` of `{baseline_of(new)}` itself takes {factor:.2f} times "
                "as long in NEW: another speed of the machine, or another vLLM."
            )
    for which, document in (("OLD", old), ("NEW", new)):
        found += [f"{which} warns: {warning}" for warning in document.warnings]
    return found


def _settings(profile: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """All settings by dotted name, the harmless ones left out."""
    flat: dict[str, Any] = {}
    for key, value in profile.items():
        if not prefix and key in HARMLESS:
            continue
        if isinstance(value, dict):
            flat |= _settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
