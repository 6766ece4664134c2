# SPDX-License-Identifier: Apache-2.0
"""The limits that NEW must keep: configs/limits/*.toml, and what became of each.

What the run cannot tell is undecided, which fails only where the file says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lab.config import ConfigError, read_toml
from lab.records.per_config import ConfigEntry, PerConfig, Verdict
from lab.stats.aims import Aim, judge
from lab.stats.checks import OUTCOMES, Check, Outcome
from lab.stats.interval import Interval
from lab.stats.markdown import TIMES
from microbench.compare.changes import change, got_worse
from microbench.compare.comparable import other_machine, other_window
from microbench.compare.numbers import (
    baseline_of,
    floor_of,
    growing_methods,
    methods_of,
    metrics_of,
    p50_us,
    slope,
    times_baseline,
    times_floor,
)

Positive = Annotated[float, msgspec.Meta(gt=0)]

# What can be limited by metric, this one by method of the connector, too; and its unit.
SLOPE = "slope_us_per_1k_blocks"
QUANTITIES = {
    SLOPE: "µs per 1,000 blocks",
    "p50_us": "µs",
    "times_baseline": f"{TIMES} the baseline's p50",
    "times_floor": f"{TIMES} the no-op connector's p50",
    "times_old": f"{TIMES} OLD's p50",
}


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a config may cost at most, by metric (`schedule`, `step`, ...)."""

    verdicts: list[Verdict] | None = None
    """Those allowed. Without it: no worse than in OLD."""
    slope_us_per_1k_blocks: dict[str, float] = {}
    p50_us: dict[str, Positive] = {}
    times_baseline: dict[str, Positive] = {}
    times_floor: dict[str, Positive] = {}
    times_old: dict[str, Positive] = {}
    """As multiples of the baseline in both runs, so that a slow day is no change."""
    undecided: Literal["pass", "fail"] | None = None
    """Whether what the run cannot tell passes. Without it: as in the default, pass."""


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`default` is for all configs; what `configs` says of one goes before it."""

    default: Limits = Limits()
    configs: dict[str, Limits] = {}
    axes: dict[str, Any] = {}
    """Not of a sweep: what a connector may grow with (observatory/limits.py)."""


def read_limits(path: Path, old: PerConfig, new: PerConfig) -> LimitsFile:
    """Raises ConfigError, also for a metric that neither run has."""
    limits = read_toml(path, LimitsFile)
    metrics, methods = metrics_of([old, new]), methods_of([old, new])
    tables = {"default": limits.default} | limits.configs
    for table, told in tables.items():
        for quantity in QUANTITIES:
            known = metrics + (methods if quantity == SLOPE else [])
            for metric in getattr(told, quantity):
                if metric not in known:
                    raise ConfigError(
                        f"{path}: {table}.{quantity} names {metric!r}; "
                        f"the runs have {', '.join(known)}"
                    )
    return limits


def check_all(old: PerConfig, new: PerConfig, limits: LimitsFile) -> list[Check]:
    """Every limit on every config, in the order of NEW."""
    names = dict.fromkeys([*new.configs, *old.configs, *limits.configs])
    return [check for name in names for check in _checks(old, new, name, limits)]


def _checks(
    old: PerConfig, new: PerConfig, name: str, limits: LimitsFile
) -> Iterator[Check]:
    own, default = limits.configs.get(name, Limits()), limits.default
    strict = (own.undecided or default.undecided) == "fail"

    def made(what: str, bound: str, found: str, outcome: Outcome) -> Check:
        fails = outcome == "broken" or (outcome == "undecided" and strict)
        return Check(name, what, bound, found, outcome, fails)

    if name not in new.configs:
        missed: Outcome = "broken" if name in limits.configs else "undecided"
        yield made("verdict", "measured", "not in NEW", missed)
        return
    allowed = default.verdicts if own.verdicts is None else own.verdicts
    yield made("verdict", *_verdict(old, new, name, allowed))
    for quantity, unit in QUANTITIES.items():
        bounds = getattr(default, quantity) | getattr(own, quantity)
        for metric, at_most in bounds.items():
            if metric not in getattr(own, quantity) and _is_yardstick(
                old, new, name, quantity
            ):
                continue
            aim = Aim(what=f"{quantity} of {metric}", at_most=at_most, unit=unit)
            number = _number(old, new, name, metric, quantity)
            if number is None:
                why = f"not known ({_why_not(old, new, name, quantity)})"
                yield made(aim.what, aim.bound, why, "undecided")
            else:
                found = f"{number:,.3g}"
                yield made(aim.what, aim.bound, found, OUTCOMES[judge(number, aim)])


def _verdict(
    old: PerConfig, new: PerConfig, name: str, allowed: list[Verdict] | None
) -> tuple[str, str, Outcome]:
    """(bound, found, outcome) of the config's verdict."""
    now = new.configs[name].verdict
    found = ", ".join([now, *_grown(new.configs[name])])
    if allowed is not None:
        bound = " or ".join(allowed) or "none"
        if now in allowed:
            return bound, found, "kept"
        return bound, found, "undecided" if now == "inconclusive" else "broken"
    if name not in old.configs:
        return "not in OLD", found, _of_unknown_past(now)
    before = old.configs[name]
    bound = f"no worse than {before.verdict}"
    if now == "failed" or got_worse(before, new.configs[name]):
        return bound, found, "broken"
    unclear = now == "inconclusive" != before.verdict
    return bound, found, "undecided" if unclear else "kept"


def _grown(entry: ConfigEntry) -> Iterator[str]:
    for method, slope_us in growing_methods(entry).items():
        yield f"`{method}` {slope_us:+.3g} µs per 1,000 blocks"


def _of_unknown_past(now: Verdict) -> Outcome:
    if now == "failed":
        return "broken"
    return "kept" if now == "flat" else "undecided"


def _is_yardstick(old: PerConfig, new: PerConfig, name: str, quantity: str) -> bool:
    """Whether the config is what `quantity` is relative to."""
    if quantity == "times_floor":
        return name == floor_of(new)
    if quantity == "times_baseline":
        return name == baseline_of(new)
    return quantity == "times_old" and name == baseline_of(new) == baseline_of(old)


def _number(
    old: PerConfig, new: PerConfig, name: str, metric: str, quantity: str
) -> Interval | None:
    if quantity == SLOPE:
        return slope(new.configs[name], metric)
    if quantity == "times_old":
        if name not in old.configs:
            return None
        return change(old, new, name, metric).times_old
    of_new = {
        "p50_us": p50_us,
        "times_baseline": times_baseline,
        "times_floor": times_floor,
    }
    return of_new[quantity](new, name, metric)


def _why_not(old: PerConfig, new: PerConfig, name: str, quantity: str) -> str:
    """Why there is no number to judge."""
    if new.configs[name].verdict == "failed":
        return "it failed"
    if quantity != "times_old":
        return "not in NEW, or without an interval"
    if name not in old.configs:
        return "the config is not in OLD"
    if name == baseline_of(new):
        return "it is the baseline, the measure of the others"
    reason = other_machine(old, new) or other_window(old, new)
    return reason or "not in both runs, or without an interval"
