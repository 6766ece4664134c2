# SPDX-License-Identifier: Apache-2.0
"""Limits files: configs/limits/*.toml, for `kvtax compare`, `sweep` and `gate`.

    [default]                               # every config of a sweep
    verdicts = ["flat"]
    times_baseline = { schedule = 3.0 }
    [configs.mooncake_both]                 # overrides the default
    slope_us_per_1k_blocks = { schedule = 2.0, "worker.get_finished" = 1.0 }
    [axes.running]                          # one connector along an axis
    slope_us = { connector = 0.2, "worker.start_load_kv" = 0.1 }
    level_us = { connector = 100 }
    order = { connector = "constant" }

Unknown tables and fields are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvtax.config import ConfigError, read_toml
from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.records.run import Verdict
from kvtax.report.markdown import TIMES
from kvtax.stats import Estimate
from kvtax.verdict.aims import OUTCOMES, Aim, Check, Outcome, judge
from kvtax.verdict.run_changes import (
    baseline_of,
    change,
    floor_of,
    got_worse,
    growing_methods,
    methods_of,
    metrics_of,
    other_machine,
    other_window,
    p50_us,
    slope,
    times_baseline,
    times_floor,
)

Positive = Annotated[float, msgspec.Meta(gt=0)]
AxisName = Literal[
    "cache", "running", "context", "prompt", "arrivals", "fragments", "tier"
]
Order = Literal["constant", "linear", "quadratic"]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most that a config may cost, by metric (`schedule`, `step`, ...).

    `slope_us_per_1k_blocks` takes methods of the connector, too.
    """

    verdicts: list[Verdict] | None = None
    """Allowed verdicts; by default, any that is no worse than OLD's."""
    slope_us_per_1k_blocks: dict[str, float] = {}
    p50_us: dict[str, Positive] = {}
    times_baseline: dict[str, Positive] = {}
    times_floor: dict[str, Positive] = {}
    times_old: dict[str, Positive] = {}
    """Ratio of multiples of the baseline, so that a slow day is no change."""
    undecided: Literal["pass", "fail"] | None = None
    """Whether a limit that the run cannot decide passes (default: pass)."""


class AxisLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most that a connector may cost along an axis, by method.

    The method `connector` stands for all calls. `slope_us` is per step and per running
    request, arrival per step, 1,000 cached blocks or 1,000 tokens of context;
    `level_us` is per step at the highest level; `order` is the fastest growth.
    """

    slope_us: dict[str, float] = {}
    level_us: dict[str, float] = {}
    order: dict[str, Order] = {}


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limits file: `default` and `configs` for sweeps, `axes` for gates."""

    default: Limits = Limits()
    configs: dict[str, Limits] = {}
    axes: dict[AxisName, AxisLimits] = {}


def read_limits(path: Path) -> LimitsFile:
    """Read a limits file. Raises ConfigError."""
    return read_toml(path, LimitsFile)


# Quantities of a limit, with their units.
SLOPE = "slope_us_per_1k_blocks"
QUANTITIES = {
    SLOPE: "µs per 1,000 blocks",
    "p50_us": "µs",
    "times_baseline": f"{TIMES} the baseline's p50",
    "times_floor": f"{TIMES} the no-op connector's p50",
    "times_old": f"{TIMES} OLD's p50",
}


def require_known(limits: LimitsFile, old: PerConfig, new: PerConfig) -> None:
    """Check the metrics of `limits`. Raises ConfigError for one that no run has."""
    metrics, methods = metrics_of([old, new]), methods_of([old, new])
    for table, its_limits in ({"default": limits.default} | limits.configs).items():
        for quantity in QUANTITIES:
            known = metrics + (methods if quantity == SLOPE else [])
            for metric in getattr(its_limits, quantity):
                if metric not in known:
                    raise ConfigError(
                        f"limits: {table}.{quantity} names {metric!r}; "
                        f"the runs have {', '.join(known)}"
                    )


def check_all(old: PerConfig, new: PerConfig, limits: LimitsFile) -> list[Check]:
    """Check every limit on every config, in the order of NEW."""
    names = dict.fromkeys([*new.configs, *old.configs, *limits.configs])
    return [check for name in names for check in _checks(old, new, name, limits)]


def _checks(
    old: PerConfig, new: PerConfig, name: str, limits: LimitsFile
) -> Iterator[Check]:
    own, default = limits.configs.get(name, Limits()), limits.default
    strict = (own.undecided or default.undecided) == "fail"

    def checked(what: str, bound: str, found: str, outcome: Outcome) -> Check:
        fails = outcome == "broken" or (outcome == "undecided" and strict)
        return Check(name, what, bound, found, outcome, fails)

    if name not in new.configs:
        outcome: Outcome = "broken" if name in limits.configs else "undecided"
        yield checked("verdict", "measured", "not in NEW", outcome)
        return
    allowed = default.verdicts if own.verdicts is None else own.verdicts
    yield checked("verdict", *_verdict(old, new, name, allowed))
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
                why = f"no number ({_why_not(old, new, name, quantity)})"
                yield checked(aim.what, aim.bound, why, "undecided")
            else:
                found = f"{number:,.3g}"
                yield checked(aim.what, aim.bound, found, OUTCOMES[judge(number, aim)])


def _verdict(
    old: PerConfig, new: PerConfig, name: str, allowed: list[Verdict] | None
) -> tuple[str, str, Outcome]:
    """Return (bound, found, outcome) for the config's verdict."""
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
    """Return whether `quantity` is relative to this config."""
    if quantity == "times_floor":
        return name == floor_of(new)
    if quantity == "times_baseline":
        return name == baseline_of(new)
    return quantity == "times_old" and name == baseline_of(new) == baseline_of(old)


def _number(
    old: PerConfig, new: PerConfig, name: str, metric: str, quantity: str
) -> Estimate | None:
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
    """Return the reason for a missing number."""
    if new.configs[name].verdict == "failed":
        return "it failed"
    if quantity != "times_old":
        return "not in NEW, or without an interval"
    if name not in old.configs:
        return "the config is not in OLD"
    if name == baseline_of(new):
        return "it is the baseline, which the others are divided by"
    reason = other_machine(old, new) or other_window(old, new)
    return reason or "not in both runs, or without an interval"
