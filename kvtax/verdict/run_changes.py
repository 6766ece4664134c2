# SPDX-License-Identifier: Apache-2.0
"""Differences between two runs, beyond the noise that both have measured.

The machine's speed drifts from run to run. Both runs have the baseline, so a level is
stated as a multiple of the baseline's, and a slope is divided by the baseline's ratio.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

import msgspec

from kvtax.records.files import read_document
from kvtax.records.per_config import ConfigEntry, PerConfig, Quantiles
from kvtax.stats import Estimate

FILE = "per_config.json"


def read_results(path: Path) -> PerConfig:
    """Read per_config.json at `path`, or in the folder `path`. Raises RecordsError."""
    return read_document(path / FILE if path.is_dir() else path, PerConfig)


def metrics_of(documents: Iterable[PerConfig]) -> list[str]:
    """Return all metrics with a verdict in any of the documents."""
    entries = (entry for doc in documents for entry in doc.configs.values())
    return list(dict.fromkeys(name for entry in entries for name in entry.verdict_of))


def methods_of(documents: Iterable[PerConfig]) -> list[str]:
    """Return all timed methods of connectors, such as `worker.get_finished`."""
    entries = (entry for doc in documents for entry in doc.configs.values())
    return list(
        dict.fromkeys(name for entry in entries for name in entry.methods or {})
    )


def level_us(entry: ConfigEntry, metric: str) -> Quantiles | None:
    """Return the quantiles of `metric`, None if the config has none."""
    level = getattr(entry, f"{metric}_us", None)
    return level if level and level.get("p50") is not None else None


def slope(entry: ConfigEntry, name: str) -> Estimate | None:
    """Return the us per 1,000 cached blocks of a metric or a connector's method."""
    method = (entry.methods or {}).get(name)
    of_method = method.slope_per_1k_blocks if method else None
    return _with_ends(entry.slope_us_per_1k_blocks.get(name) or of_method)


def growing_methods(entry: ConfigEntry) -> dict[str, Estimate]:
    """Return the slopes of the growing methods, steepest first, of a growing config."""
    if entry.verdict != "grows":
        return {}
    slopes = {name: slope(entry, name) for name in entry.methods or {}}
    grown = {name: found for name, found in slopes.items() if found and found.low > 0}
    return dict(sorted(grown.items(), key=lambda item: -item[1].value))


def p50_us(document: PerConfig, name: str, metric: str) -> Estimate | None:
    """Return the median of `metric` with the interval of its difference from baseline.

    The baseline has the interval of its difference from its twin. No interval is
    narrower than the noise floor, the size of that difference.
    """
    entry = document.configs[name]
    level = level_us(entry, metric)
    difference: Estimate | None
    if name == baseline_of(document):
        difference = (document.noise_floor.p50_us or {}).get(metric)
    else:
        difference = (entry.vs_plain or {}).get(metric)
    difference = _with_ends(difference)
    if level is None or difference is None:
        return None
    p50, floor = float(level["p50"]), document.noise_floor.p50(metric)
    below = max(floor, difference.value - difference.low)
    above = max(floor, difference.high - difference.value)
    return Estimate(p50, (p50 - below, p50 + above))


def times_baseline(document: PerConfig, name: str, metric: str) -> Estimate | None:
    """Return the median of `metric` over that of the run's baseline."""
    base = baseline_p50_us(document, metric)
    p50 = p50_us(document, name, metric)
    if p50 is None or not base:
        return None
    return Estimate(p50.value / base, (p50.low / base, p50.high / base))


def times_floor(document: PerConfig, name: str, metric: str) -> Estimate | None:
    """Return the median of `metric` over that of the no-op connector."""
    return _with_ends((document.configs[name].vs_noop or {}).get(metric))


def baseline_of(document: PerConfig) -> str | None:
    """Return the baseline: the config without a difference from the baseline."""
    return _without(document, "vs_plain")


def floor_of(document: PerConfig) -> str | None:
    """Return the no-op connector: the config without a ratio to the no-op."""
    return _without(document, "vs_noop")


def baseline_p50_us(document: PerConfig, metric: str) -> float | None:
    """Return the baseline's median of `metric`, None without a baseline."""
    name = baseline_of(document)
    level = name and level_us(document.configs[name], metric)
    return float(level["p50"]) if level else None


def _without(document: PerConfig, field: str) -> str | None:
    """Return the only measured config without `field`."""
    measured = {n: e for n, e in document.configs.items() if e.n_window_steps}
    lacking = [name for name, entry in measured.items() if not getattr(entry, field)]
    return lacking[0] if len(lacking) == 1 < len(measured) else None


def _with_ends(estimate: Estimate | None) -> Estimate | None:
    """Return the estimate if its interval is known."""
    return estimate if estimate and estimate.ci95 else None


# Settings that do not change the numbers: names, and how much was measured.
HARMLESS = {"name", "summary", "configs", "repeats", "most_repeats", "minutes"}
MACHINE = ("cpu_model", "cpu_count", "gpu_model")
# Levels are stated at |cache| within 5 %.
SAME_CACHE = 0.05
# Ratio of the two baselines beyond which the machines were not alike.
SAME_SPEED = 1.5


class NotComparable(Exception):
    """The two runs measured different things; the message names the settings."""

    exit_code = 2


def require_same_profile(old: PerConfig, new: PerConfig) -> None:
    """Check the profiles. Raises NotComparable with each setting that differs."""
    before, after = _settings(old), _settings(new)
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
    """Return the reason why the runs' times cannot be compared, None if they can."""
    differing = [
        f"{key} {old.provenance.get(key)!r} and {new.provenance.get(key)!r}"
        for key in MACHINE
        if old.provenance.get(key) != new.provenance.get(key)
    ]
    if not differing:
        return None
    return f"different machines, {'; '.join(differing)}"


def other_window(old: PerConfig, new: PerConfig) -> str | None:
    """Return the reason why the runs' levels cannot be compared, None if they can."""
    if old.window is None or new.window is None:
        return "one of the runs has no levels"
    before, after = old.window.at_cache_blocks, new.window.at_cache_blocks
    if abs(after - before) > SAME_CACHE * before:
        return f"levels are at {before:,} cached blocks in OLD, {after:,} in NEW"
    return None


def speed(old: PerConfig, new: PerConfig, metric: str) -> float | None:
    """Return the ratio of the baseline's times, NEW over OLD; None without a baseline.

    A metric without a level takes the ratio of the first metric that has one.
    """
    if baseline_of(old) != baseline_of(new):
        return None
    for name in (metric, *metrics_of([old, new])):
        before, after = (baseline_p50_us(document, name) for document in (old, new))
        if before is not None and after is not None:
            return after / before
    return None


def cautions(old: PerConfig, new: PerConfig) -> list[str]:
    """List reasons to distrust the comparison."""
    reasons = []
    if machine := other_machine(old, new):
        reasons.append(
            f"No time is compared with OLD: {machine}. Measure OLD again on NEW's "
            "machine, or limit only NEW (`times_baseline`, `times_floor`, "
            "`slope_us_per_1k_blocks`)."
        )
    if window := other_window(old, new):
        reasons.append(f"No level is compared with OLD: {window}.")
    before, after = _settings(old), _settings(new)
    if only_one := sorted(set(before) ^ set(after)):
        reasons.append(f"Only one of the two profiles has {', '.join(only_one)}.")
    factors = {metric: speed(old, new, metric) for metric in metrics_of([old, new])}
    if None in factors.values():
        reasons.append(
            "The runs share no baseline, so a slower machine looks like a slower "
            "connector."
        )
    for metric, factor in factors.items():
        own = baseline_p50_us(new, metric) is not None
        if own and factor and not 1 / SAME_SPEED <= factor <= SAME_SPEED:
            reasons.append(
                f"`{metric}` of `{baseline_of(new)}` itself takes {factor:.2f} times "
                "as long in NEW: the machine's speed or vLLM changed."
            )
    both = [text for text in old.warnings if text in new.warnings]
    reasons += [f"Both runs warn: {text}" for text in both]
    for which, document in (("OLD", old), ("NEW", new)):
        reasons += [f"{which} warns: {t}" for t in document.warnings if t not in both]
    return reasons


def _settings(document: PerConfig) -> dict[str, Any]:
    """Return all settings by dotted name, without the harmless ones."""
    settings = _flat(msgspec.to_builtins(document.profile))
    return {key: value for key, value in settings.items() if key not in HARMLESS}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        own = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat |= {f"{prefix}{key}": value} if own is None else own
    return flat


# Verdicts in the order of their cost; *inconclusive* has no place.
SEVERITY = {"flat": 0, "drifts": 1, "grows": 2, "failed": 3}


@dataclass(frozen=True)
class Change:
    """Change of one metric of one config; None where it cannot be compared.

    `slope` is NEW less OLD, in us per 1,000 blocks; `times_old` is NEW's p50 over
    OLD's.
    """

    config: str
    metric: str
    slope: Estimate | None
    times_old: Estimate | None
    slope_changed: bool
    level_changed: bool


def change(old: PerConfig, new: PerConfig, name: str, metric: str) -> Change:
    """Compute the change of `metric` in the config `name` of both runs."""
    factor = speed(old, new, metric) or 1.0
    machine = other_machine(old, new)
    slopes = None if machine else _slope_change(old, new, name, metric, factor)
    times_old = None
    if not machine and not other_window(old, new):
        times_old = _times_old(old, new, name, metric, factor)
    floor = max(d.noise_floor.slope(metric) for d in (old, new))
    return Change(
        name,
        metric,
        slopes,
        times_old,
        bool(slopes and _excludes(slopes, 0) and abs(slopes.value) > floor),
        bool(times_old and _excludes(times_old, 1)),
    )


def got_worse(old: ConfigEntry, new: ConfigEntry) -> bool:
    """Return whether NEW's verdict stands for more cost than OLD's."""
    return SEVERITY.get(new.verdict, 0) > SEVERITY.get(old.verdict, 0)


def _slope_change(
    old: PerConfig, new: PerConfig, name: str, metric: str, factor: float
) -> Estimate | None:
    before, after = (slope(d.configs[name], metric) for d in (old, new))
    if before is None or after is None:
        return None
    value = after.value / factor - before.value
    low = hypot((after.value - after.low) / factor, before.high - before.value)
    high = hypot((after.high - after.value) / factor, before.value - before.low)
    return Estimate(value, (value - low, value + high))


def _times_old(
    old: PerConfig, new: PerConfig, name: str, metric: str, factor: float
) -> Estimate | None:
    if name == baseline_of(new) == baseline_of(old):
        # The others' times are divided by the baseline's.
        return None
    before, after = (p50_us(d, name, metric) for d in (old, new))
    if before is None or after is None:
        return None
    value = after.value / before.value / factor
    low = hypot(
        (after.value - after.low) / after.value,
        (before.high - before.value) / before.value,
    )
    high = hypot(
        (after.high - after.value) / after.value,
        (before.value - before.low) / before.value,
    )
    return Estimate(value, (value * (1 - low), value * (1 + high)))


def _excludes(interval: Estimate, value: float) -> bool:
    return not interval.low <= value <= interval.high
