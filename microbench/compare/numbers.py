# SPDX-License-Identifier: Apache-2.0
"""The numbers of one config in per_config.json, each with an interval.

A number whose interval is not known is None: nothing can be decided with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.records.documents import read_document
from lab.records.per_config import ConfigEntry, PerConfig, Quantiles, Stated
from lab.stats.interval import Interval

FILE = "per_config.json"


def read_results(path: Path) -> PerConfig:
    """The document at `path`, or in the folder `path`. Raises RecordsError."""
    return read_document(path / FILE if path.is_dir() else path, PerConfig)


def times_of(documents: Iterable[PerConfig]) -> list[str]:
    """`schedule`, `overhead`, `step` and whatever else has a verdict somewhere."""
    entries = (entry for doc in documents for entry in doc.configs.values())
    return list(dict.fromkeys(time for entry in entries for time in entry.verdict_of))


def level_us(entry: ConfigEntry, time: str) -> Quantiles | None:
    """Quantiles of `time`; None where the config has none."""
    level = getattr(entry, f"{time}_us", None)
    return level if level and level.get("p50") is not None else None


def slope(entry: ConfigEntry, time: str) -> Interval | None:
    """us per 1,000 cached blocks."""
    return _interval(entry.slope_us_per_1k_blocks.get(time))


def p50_us(document: PerConfig, name: str, time: str) -> Interval | None:
    """The median of `time`, as uncertain as its difference from the baseline.

    The interval is never narrower than what two runs of the same config differ by.
    """
    entry = document.configs[name]
    level = level_us(entry, time)
    floor = document.noise_floor.p50_floor(time)
    against = _interval((entry.vs_plain or {}).get(time))
    if level is None or (against is None and floor == 0):
        return None
    p50 = float(level["p50"])
    below = above = floor
    if against is not None:
        below = max(floor, against.value - against.ci95[0])
        above = max(floor, against.ci95[1] - against.value)
    return Interval(p50, (p50 - below, p50 + above))


def times_baseline(document: PerConfig, name: str, time: str) -> Interval | None:
    """The median of `time` over that of the run's baseline."""
    base = baseline_p50_us(document, time)
    p50 = p50_us(document, name, time)
    return p50 and base and Interval(p50.value / base, _scaled(p50.ci95, 1 / base))


def times_floor(document: PerConfig, name: str, time: str) -> Interval | None:
    """The median of `time` over that of the no-op connector."""
    return _interval((document.configs[name].vs_noop or {}).get(time))


def baseline_of(document: PerConfig) -> str | None:
    """The config that the others have their difference from."""
    return _without(document, "vs_plain")


def floor_of(document: PerConfig) -> str | None:
    """The config that the others have their ratio to."""
    return _without(document, "vs_noop")


def baseline_p50_us(document: PerConfig, time: str) -> float | None:
    """The median of `time` of the baseline; None without a baseline."""
    name = baseline_of(document)
    level = name and level_us(document.configs[name], time)
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


def _scaled(edges: tuple[Any, Any], by: float) -> tuple[float, float]:
    return edges[0] * by, edges[1] * by
