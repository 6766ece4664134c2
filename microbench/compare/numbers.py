# SPDX-License-Identifier: Apache-2.0
"""The numbers of one config in per_config.json, each with an interval.

A number whose interval is not known is None: nothing can be decided with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab.records.documents import read_document
from lab.records.per_config import ConfigEntry, PerConfig, Quantiles, Stated
from lab.stats.interval import Interval

FILE = "per_config.json"


def read_results(path: Path) -> PerConfig:
    """The document at `path`, or in the folder `path`. Raises RecordsError."""
    return read_document(path / FILE if path.is_dir() else path, PerConfig)


def metrics_of(documents: Iterable[PerConfig]) -> list[str]:
    """`schedule` and whatever else has a verdict in one of the documents."""
    entries = (entry for doc in documents for entry in doc.configs.values())
    return list(dict.fromkeys(name for entry in entries for name in entry.verdict_of))


def methods_of(documents: Iterable[PerConfig]) -> list[str]:
    """The connectors' methods that were timed, such as `worker.get_finished`."""
    entries = (entry for doc in documents for entry in doc.configs.values())
    return list(
        dict.fromkeys(name for entry in entries for name in entry.methods or {})
    )


def level_us(entry: ConfigEntry, metric: str) -> Quantiles | None:
    """Quantiles of `metric`; None where the config has none."""
    level = getattr(entry, f"{metric}_us", None)
    return level if level and level.get("p50") is not None else None


def slope(entry: ConfigEntry, name: str) -> Interval | None:
    """us per 1,000 cached blocks, of a metric or of a connector's method."""
    method = (entry.methods or {}).get(name, {})
    of_metrics = entry.slope_us_per_1k_blocks
    return _interval(of_metrics.get(name) or method.get("slope_per_1k_blocks"))


def growing_methods(entry: ConfigEntry) -> dict[str, Interval]:
    """What makes a config that grows grow: the steepest method first."""
    if entry.verdict != "grows":
        return {}
    slopes = {name: slope(entry, name) for name in entry.methods or {}}
    grown = {name: one for name, one in slopes.items() if one and one.ci95[0] > 0}
    return dict(sorted(grown.items(), key=lambda one: -one[1].value))


def p50_us(document: PerConfig, name: str, metric: str) -> Interval | None:
    """The median of `metric`, as uncertain as its difference from the baseline; the
    baseline's is as uncertain as its difference from its twin.

    The interval is never narrower than what those two differ by.
    """
    entry = document.configs[name]
    level = level_us(entry, metric)
    differences = entry.vs_plain
    if name == baseline_of(document):
        differences = document.noise_floor.p50_us
    difference = _interval((differences or {}).get(metric))
    if level is None or difference is None:
        return None
    p50, floor = float(level["p50"]), document.noise_floor.p50_floor(metric)
    below = max(floor, difference.value - difference.ci95[0])
    above = max(floor, difference.ci95[1] - difference.value)
    return Interval(p50, (p50 - below, p50 + above))


def times_baseline(document: PerConfig, name: str, metric: str) -> Interval | None:
    """The median of `metric` over that of the run's baseline."""
    base = baseline_p50_us(document, metric)
    p50 = p50_us(document, name, metric)
    if p50 is None or not base:
        return None
    low, high = p50.ci95
    return Interval(p50.value / base, (low / base, high / base))


def times_floor(document: PerConfig, name: str, metric: str) -> Interval | None:
    """The median of `metric` over that of the no-op connector."""
    return _interval((document.configs[name].vs_noop or {}).get(metric))


def baseline_of(document: PerConfig) -> str | None:
    """The config that the others have their difference from."""
    return _without(document, "vs_plain")


def floor_of(document: PerConfig) -> str | None:
    """The config that the others have their ratio to."""
    return _without(document, "vs_noop")


def baseline_p50_us(document: PerConfig, metric: str) -> float | None:
    """The median of `metric` of the baseline; None without a baseline."""
    name = baseline_of(document)
    level = name and level_us(document.configs[name], metric)
    return float(level["p50"]) if level else None


def _without(document: PerConfig, field: str) -> str | None:
    """The measured config that lacks what all other measured ones have."""
    measured = {n: e for n, e in document.configs.items() if e.n_window_steps}
    found = [name for name, entry in measured.items() if not getattr(entry, field)]
    return found[0] if len(found) == 1 < len(measured) else None


def _interval(stated: Stated | None) -> Interval | None:
    if stated is None or stated.get("ci95") is None:
        return None
    low, high = stated["ci95"]
    return Interval(float(stated["value"]), (float(low), float(high)))
