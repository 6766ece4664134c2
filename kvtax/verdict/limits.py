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
    shape = { connector = "flat" }

Unknown tables and fields are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from kvtax.config import ConfigError, read_toml
from kvtax.records.observatory_cell import CellRecord
from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.records.run import Verdict
from kvtax.report.markdown import TIMES
from kvtax.stats import Estimate
from kvtax.verdict.aims import OUTCOMES, Aim, Check, Outcome, judge
from kvtax.verdict.axes import (
    ALL,
    AXES,
    RARE,
    Growth,
    growth,
    methods,
    require_axes,
    times_beside,
)
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
# Least first: what grows in none of these shapes is beyond "flat" alone.
AtMost = Literal["flat", "linear", "curved"]
SHAPES: tuple[AtMost, ...] = get_args(AtMost)


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

    The method `connector` stands for all calls; `threads` and `processes` for CPU time
    beside the engine's thread. `slope_us` is per step and per running
    request, arrival per step, 1,000 cached blocks or 1,000 tokens of context;
    `level_us` is per step at the highest level; `shape` is the fastest growth.
    """

    slope_us: dict[str, float] = {}
    level_us: dict[str, float] = {}
    shape: dict[str, AtMost] = {}


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limits file: `default` and `configs` for sweeps, `axes` for gates."""

    default: Limits = Limits()
    configs: dict[str, Limits] = {}
    axes: dict[str, AxisLimits] = {}

    def __post_init__(self) -> None:
        require_axes(self.axes)


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


@dataclass(frozen=True)
class _Checker:
    """Makes the checks of one config; what is undecided fails if `strict`."""

    config: str
    strict: bool = False

    def check(self, what: str, bound: str, found: str, outcome: Outcome) -> Check:
        fails = outcome == "broken" or (outcome == "undecided" and self.strict)
        return Check(self.config, what, bound, found, outcome, fails)

    def aim(self, aim: Aim, found: Estimate) -> Check:
        outcome = OUTCOMES[judge(found, aim)]
        return self.check(aim.what, aim.bound, f"{found:,.3g}", outcome)


def check_runs(old: PerConfig, new: PerConfig, limits: LimitsFile) -> list[Check]:
    """Check every limit of sweeps on every config, in the order of NEW."""
    names = dict.fromkeys([*new.configs, *old.configs, *limits.configs])
    return [check for name in names for check in _of_config(old, new, name, limits)]


def _of_config(
    old: PerConfig, new: PerConfig, name: str, limits: LimitsFile
) -> Iterator[Check]:
    own, default = limits.configs.get(name, Limits()), limits.default
    checker = _Checker(name, (own.undecided or default.undecided) == "fail")
    if name not in new.configs:
        outcome: Outcome = "broken" if name in limits.configs else "undecided"
        yield checker.check("verdict", "measured", "not in NEW", outcome)
        return
    allowed = default.verdicts if own.verdicts is None else own.verdicts
    yield checker.check("verdict", *_verdict(old, new, name, allowed))
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
                yield checker.check(aim.what, aim.bound, why, "undecided")
            else:
                yield checker.aim(aim, number)


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


# A machine may be this much slower than when the old result was made.
SLOWER = 1.5


def check_cell(cell: CellRecord, limits: LimitsFile) -> list[Check]:
    """Check every limit along an axis on `cell`.

    Raises ConfigError for a method that it did not call.
    """
    checker = _Checker(cell.connector, limits.default.undecided == "fail")
    return [
        check
        for axis, its_limits in limits.axes.items()
        for check in _along(checker, cell, axis, its_limits)
    ]


def check_since(cell: CellRecord, old: CellRecord, since: str) -> list[Check]:
    """Check that nothing grows along an axis that did not in `old`, or much less.

    A slope is broken if its whole interval is above the axis' margin and above what
    `old` had on a machine SLOWER. So is a growth without such a slope, as of a cost
    that rises and falls again, where `old` had none. Axes and times beside the engine's
    thread that are younger than `old` are left out.
    """
    return [
        check
        for axis in cell.means_us
        if axis in old.levels
        for method in _methods(cell, axis, old)
        for check in _than_before(cell, old, axis, method, since)
    ]


def _along(
    checker: _Checker, cell: CellRecord, axis: str, limits: AxisLimits
) -> Iterator[Check]:
    unit = f"µs per {AXES[axis].per_unit}"
    for method, at_most in limits.slope_us.items():
        found = _growth(cell, axis, method)
        aim = Aim(what=f"slope of {method} along {axis}", at_most=at_most, unit=unit)
        yield checker.aim(aim, found.slope)
    for method, at_most in limits.level_us.items():
        found = _growth(cell, axis, method)
        what = f"{method} at {found.levels[-1]:,} {AXES[axis].units}"
        yield checker.aim(Aim(what=what, at_most=at_most, unit="µs"), found.last)
    for method, shape in limits.shape.items():
        found = _growth(cell, axis, method)
        yield checker.check(
            f"growth of {method} along {axis}",
            f"at most {shape}",
            f"{found.words}, slope {found.slope:+.3g} {unit}",
            _of_shape(found, shape),
        )


def _of_shape(found: Growth, at_most: AtMost) -> Outcome:
    shape = "flat" if found.verdict == "flat" else found.shape
    if shape is None or shape == RARE:
        return "broken" if found.rises and at_most == "flat" else "undecided"
    return "kept" if SHAPES.index(shape) <= SHAPES.index(at_most) else "broken"


def _than_before(
    cell: CellRecord, old: CellRecord, axis: str, method: str, since: str
) -> Iterator[Check]:
    checker = _Checker(cell.connector)
    found, before = _growth(cell, axis, method), growth(old, axis, f"{method}_us")
    was = max(0.0, before.slope.high) if before else 0.0
    aim = Aim(
        what=f"slope of {method} along {axis}, since {since}",
        at_most=max(AXES[axis].margin_us, SLOWER * was),
        unit=f"µs per {AXES[axis].per_unit}",
    )
    yield checker.aim(aim, found.slope)
    was_flat = before is None or before.verdict == "flat"
    has_slope = found.exponent is not None
    if found.rises and was_flat and not has_slope:
        what = f"growth of {method} along {axis}, since {since}"
        levels = ", ".join(f"{us:,.1f}" for us in found.level_us)
        yield checker.check(what, "flat", f"{levels} µs", "broken")


def _growth(cell: CellRecord, axis: str, method: str) -> Growth:
    if found := growth(cell, axis, f"{method}_us"):
        return found
    if axis not in cell.means_us:
        raise ConfigError(
            f"axes.{axis} was not measured: {cell.connector} has no reset_cache of "
            "its own, by which a tier is emptied; take the table out"
        )
    known = ", ".join(_methods(cell, axis))
    raise ConfigError(f"axes.{axis} names {method!r}; the connector has {known}")


def _methods(cell: CellRecord, axis: str, old: CellRecord | None = None) -> list[str]:
    """List what can be limited along `axis`; `old` must have what no method is."""
    beside = [
        time
        for time in times_beside(cell, axis)
        if old is None or time in times_beside(old, axis)
    ]
    return [ALL, *(time.removesuffix("_us") for time in methods(cell, axis) + beside)]
