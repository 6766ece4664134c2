# SPDX-License-Identifier: Apache-2.0
"""Outcome of the limits on a connector's costs along the axes.

kvtax/verdict/limits.py has the format of a limits file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvtax.axes.axes import AXES
from kvtax.axes.fit import ORDERS, UNKNOWN, Growth, growth, interval, methods
from kvtax.config import ConfigError
from kvtax.records.observatory_cell import CellRecord
from kvtax.stats import Estimate
from kvtax.verdict.aims import OUTCOMES, Aim, Check, Outcome, judge
from kvtax.verdict.limits import AxisLimits, AxisName, LimitsFile

ALL = "connector"
# A machine may be this much slower than when the old result was made.
SLOWER = 1.5


def check_all(cell: CellRecord, limits: LimitsFile) -> list[Check]:
    """Check every limit on `cell`.

    Raises ConfigError for a method that it did not call.
    """
    strict = limits.default.undecided == "fail"
    checks = [
        check
        for axis, told in limits.axes.items()
        for check in _along(cell, axis, told)
    ]
    return [
        replace(check, fails=check.fails or (strict and check.outcome == "undecided"))
        for check in checks
    ]


def no_worse(cell: CellRecord, old: CellRecord, since: str) -> list[Check]:
    """Check that nothing grows along an axis that did not in `old`, or much less.

    A slope is broken if its whole interval is above the axis' margin and above what
    `old` had on a machine SLOWER. So is a growth without such a slope, as of a cost
    that rises and falls again, where `old` had none. Axes that are younger than `old`
    are left out.
    """
    return [
        check
        for axis in cell.means_us
        if axis in old.levels
        for method in [ALL, *_methods(cell, axis)]
        for check in _than_before(cell, old, axis, method, since)
    ]


def _along(cell: CellRecord, axis: AxisName, told: AxisLimits) -> Iterator[Check]:
    unit = f"µs per {AXES[axis].per_unit}"
    for method, at_most in told.slope_us.items():
        found = _growth(cell, axis, method)
        aim = Aim(what=f"slope of {method} along {axis}", at_most=at_most, unit=unit)
        yield _judged(cell, aim, found.slope)
    for method, at_most in told.level_us.items():
        found = _growth(cell, axis, method)
        what = f"{method} at {found.levels[-1]:,} {AXES[axis].units}"
        yield _judged(cell, Aim(what=what, at_most=at_most, unit="µs"), found.last)
    for method, order in told.order.items():
        found = _growth(cell, axis, method)
        what = f"growth of {method} along {axis}"
        outcome = _of_order(axis, found, order)
        told_order = f"{found.order}, slope {found.slope:+.3g} {unit}"
        yield _made(cell, what, f"at most {order}", told_order, outcome)


def _judged(cell: CellRecord, aim: Aim, found: Estimate) -> Check:
    return _made(cell, aim.what, aim.bound, f"{found:.3g}", OUTCOMES[judge(found, aim)])


def _made(
    cell: CellRecord, what: str, bound: str, found: str, outcome: Outcome
) -> Check:
    return Check(cell.connector, what, bound, found, outcome, outcome == "broken")


def _of_order(axis: str, found: Growth, at_most: str) -> Outcome:
    if found.order == UNKNOWN:
        return "broken" if found.grows and at_most == "constant" else "undecided"
    return "kept" if ORDERS.index(found.order) <= ORDERS.index(at_most) else "broken"


def _than_before(
    cell: CellRecord, old: CellRecord, axis: str, method: str, since: str
) -> Iterator[Check]:
    found, before = _growth(cell, axis, method), growth(old, axis, f"{method}_us")
    was = max(0.0, interval(before.slope)[1]) if before else 0.0
    at_most = max(AXES[axis].margin_us, SLOWER * was)
    aim = Aim(
        what=f"slope of {method} along {axis}, since {since}",
        at_most=at_most,
        unit=f"µs per {AXES[axis].per_unit}",
    )
    yield _judged(cell, aim, found.slope)
    was_flat = before is None or before.grows is False
    has_slope = interval(found.slope)[0] > AXES[axis].margin_us
    if found.grows and was_flat and not has_slope:
        what = f"growth of {method} along {axis}, since {since}"
        levels = ", ".join(f"{us:,.1f}" for us in found.level_us)
        yield _made(cell, what, "constant", f"{levels} µs", "broken")


def _growth(cell: CellRecord, axis: str, method: str) -> Growth:
    if found := growth(cell, axis, f"{method}_us"):
        return found
    if axis not in cell.means_us:
        raise ConfigError(
            f"axes.{axis} was not measured: {cell.connector} has no reset_cache of "
            "its own, by which a tier is emptied; take the table out"
        )
    known = ", ".join([ALL, *_methods(cell, axis)])
    raise ConfigError(f"axes.{axis} names {method!r}; the connector has {known}")


def _methods(cell: CellRecord, axis: str) -> list[str]:
    return [time.removesuffix("_us") for time in methods(cell, axis)]
