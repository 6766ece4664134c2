# SPDX-License-Identifier: Apache-2.0
"""Limits files: configs/limits/*.toml, for `kvtax compare`, `sweep` and `gate`.

    undecided = "pass"
    [configs.default]                       # every config of a sweep
    verdicts = ["flat"]
    over_baseline = { step = 25 }           # in % of vLLM's own work
    [configs.mooncake_both]                 # overrides the default
    full_adds = { calls = 5, "worker.get_finished" = 1 }
    [axes.running]                          # one connector along an axis
    slope_us = { connector = 0.2, "worker.start_load_kv" = 0.1 }
    level_us = { connector = 100 }
    shape = { connector = "flat" }

Every table has the most of a quantity, by what it is of. Unknown tables and fields are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import msgspec

from kvtax.config import ConfigError, read_toml
from kvtax.records.estimate import Estimate
from kvtax.records.observatory_cell import CellRecord
from kvtax.records.per_config import Judged, PerConfig
from kvtax.records.run import Verdict
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
from kvtax.verdict.bounds import Bound, Check, Checker, Outcome

# Least first: what grows in none of these shapes is beyond "flat" alone.
AtMost = Literal["flat", "linear", "curved"]
SHAPES: tuple[AtMost, ...] = get_args(AtMost)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most that a config of a sweep may cost, in % of own work, by part."""

    verdicts: list[Verdict] | None = None
    """Allowed verdicts; by default, any that is no worse than OLD's."""
    over_baseline: dict[Literal["step", "token"], float] = {}
    """Over the baseline, of a step or of a token."""
    full_adds: dict[str, float] = {}
    """Added by a full cache, to a metric, a method or a thread."""


class AxisLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most that a connector may cost along an axis, by method.

    The method `connector` stands for all calls; `threads` and `processes` for CPU time
    beside the engine's thread. `slope_us` is per step and per running request, arrival
    per step, 1,000 cached blocks or 1,000 tokens of context; `level_us` is per step at
    the highest level; `shape` is the fastest growth.
    """

    slope_us: dict[str, float] = {}
    level_us: dict[str, float] = {}
    shape: dict[str, AtMost] = {}


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limits file: `configs` for sweeps, `axes` for gates."""

    undecided: Literal["pass", "fail"] = "pass"
    """Whether a limit that the run cannot decide passes."""
    configs: dict[str, Limits] = {}
    axes: dict[str, AxisLimits] = {}

    def __post_init__(self) -> None:
        require_axes(self.axes)

    def of(self, config: str) -> Limits:
        """Return the limits of a config: its own before the default ones."""
        own = self.configs.get(config, Limits())
        default = self.configs.get(DEFAULT, Limits())
        return Limits(
            verdicts=default.verdicts if own.verdicts is None else own.verdicts,
            over_baseline=default.over_baseline | own.over_baseline,
            full_adds=default.full_adds | own.full_adds,
        )

    @property
    def strict(self) -> bool:
        """Return whether an undecided limit fails."""
        return self.undecided == "fail"


DEFAULT = "default"
PERCENT = "% of own work"


def read_limits(path: Path) -> LimitsFile:
    """Read a limits file. Raises ConfigError."""
    return read_toml(path, LimitsFile)


def require_known(limits: LimitsFile, new: PerConfig) -> None:
    """Check the names of `limits`. Raises ConfigError for a part that no config has."""
    known = {part for entry in new.configs.values() for part in entry.held}
    for name, its_limits in limits.configs.items():
        for part in its_limits.full_adds:
            if part not in known:
                raise ConfigError(
                    f"limits: configs.{name}.full_adds names {part!r}; the run has "
                    f"{', '.join(sorted(known))}"
                )


def check_config(name: str, new: PerConfig, limits: LimitsFile) -> Iterator[Check]:
    """Check the limits on one config but its verdict."""
    checker, own = Checker(name, limits.strict), limits.of(name)
    entry = new.configs[name]
    if name != new.baseline:
        for of, at_most in own.over_baseline.items():
            share = entry.over_baseline if of == "step" else entry.tpot_over_baseline
            bound = Bound(f"cost of a {of} over {new.baseline}", at_most, PERCENT)
            yield checker.judged(bound, share.percent if share else None)
    for part, at_most in own.full_adds.items():
        bound = Bound(f"what a full cache adds to {part}", at_most, PERCENT)
        yield checker.judged(bound, _full_adds(entry, part))


def _full_adds(entry: Judged, part: str) -> Estimate | None:
    held = entry.held.get(part)
    return held.full_adds if held else None


# A machine may be this much slower than when the old result was made.
SLOWER = 1.5


def check_cell(cell: CellRecord, limits: LimitsFile) -> list[Check]:
    """Check every limit along an axis on `cell`.

    Raises ConfigError for a method that it did not call.
    """
    checker = Checker(cell.connector, limits.strict)
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
    checker: Checker, cell: CellRecord, axis: str, limits: AxisLimits
) -> Iterator[Check]:
    unit = f"µs per {AXES[axis].per_unit}"
    for method, at_most in limits.slope_us.items():
        bound = Bound(f"slope of {method} along {axis}", at_most, unit)
        yield checker.judged(bound, _growth(cell, axis, method).slope)
    for method, at_most in limits.level_us.items():
        along = _growth(cell, axis, method)
        what = f"{method} at {along.levels[-1]:,} {AXES[axis].units}"
        yield checker.judged(Bound(what, at_most, "µs"), along.last)
    for method, shape in limits.shape.items():
        along = _growth(cell, axis, method)
        yield checker.check(
            f"growth of {method} along {axis}",
            f"at most {shape}",
            f"{along.words}, slope {along.slope:+.3g} {unit}",
            _of_shape(along, shape),
        )


def _of_shape(along: Growth, at_most: AtMost) -> Outcome:
    shape = "flat" if along.verdict == "flat" else along.shape
    if shape is None or shape == RARE:
        return "broken" if along.rises and at_most == "flat" else "undecided"
    return "kept" if SHAPES.index(shape) <= SHAPES.index(at_most) else "broken"


def _than_before(
    cell: CellRecord, old: CellRecord, axis: str, method: str, since: str
) -> Iterator[Check]:
    checker = Checker(cell.connector)
    along, before = _growth(cell, axis, method), growth(old, axis, f"{method}_us")
    was = max(0.0, before.slope.high) if before else 0.0
    bound = Bound(
        f"slope of {method} along {axis}, since {since}",
        max(AXES[axis].margin_us, SLOWER * was),
        f"µs per {AXES[axis].per_unit}",
    )
    yield checker.judged(bound, along.slope)
    was_flat = before is None or before.verdict == "flat"
    has_slope = along.exponent is not None
    if along.rises and was_flat and not has_slope:
        what = f"growth of {method} along {axis}, since {since}"
        levels = ", ".join(f"{us:,.1f}" for us in along.level_us)
        yield checker.check(what, "flat", f"{levels} µs", "broken")


def _growth(cell: CellRecord, axis: str, method: str) -> Growth:
    if along := growth(cell, axis, f"{method}_us"):
        return along
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
