# SPDX-License-Identifier: Apache-2.0
"""The axes that a connector's cost per step may grow along, and growth along them.

One axis moves while the others are held: 8 running requests of 64 tokens, a prefix
cache that is nearly empty, no arrivals.

Levels are fitted, and their growth is judged, as in the sweep (kvtax/stats/held.py,
kvtax/verdict/verdict.py): a cost that rises with the time since the last reset is told
from one that grows along the axis, where the cell has its ages. What a level is stated
as, and the exponent of the shape, are medians over the passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtax.records.observatory_cell import CellRecord
from kvtax.records.run import Verdict
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.held import Fit, Holds, Shape, fit
from kvtax.stats.least_squares import exponent
from kvtax.stats.quantiles import median_of_passes
from kvtax.stats.resampling import chance_of_rise
from kvtax.verdict.holds import CHANCE
from kvtax.verdict.verdict import judge_metric


@dataclass(frozen=True)
class Axis:
    """`levels` in `units`; slopes are stated in us per step and `per` of them.

    A slope up to `margin_us` is no growth: some 50 us over the whole axis, or, per
    arrival, a small part of what vLLM's own scheduler takes.

    `alike` is whether vLLM's own work is the same at every level, so that the rest of
    the step tells how slow the machine was. `ages` is whether levels follow each other
    without a reset; elsewhere a hold is as old as it took.
    """

    units: str
    per_unit: str
    per: int
    margin_us: float
    levels: tuple[int, ...]
    alike: bool = False
    ages: bool = False


AXES = {
    "cache": Axis(
        units="cached blocks",
        per_unit="1,000 cached blocks",
        per=1_000,
        margin_us=3.0,
        levels=(256, 4_096, 8_192, 12_288, 16_384),
        alike=True,
        ages=True,
    ),
    "running": Axis(
        units="running requests",
        per_unit="running request",
        per=1,
        margin_us=0.2,
        levels=(1, 64, 128, 192, 256),
    ),
    "context": Axis(
        units="tokens of context",
        per_unit="1,000 tokens of context",
        per=1_000,
        margin_us=0.4,
        levels=(1_024, 32_768, 65_536, 131_072),
    ),
    "arrivals": Axis(
        units="arrivals per step",
        per_unit="arrival",
        per=1,
        margin_us=10.0,
        levels=(0, 2, 4, 8, 16),
    ),
    # All end in their step, beside the requests that decode.
    "prompt": Axis(
        units="tokens of an arriving prompt",
        per_unit="1,000 tokens of an arriving prompt",
        per=1_000,
        margin_us=6.0,
        levels=(64, 2_048, 4_096, 6_144, 8_128),
    ),
    # A prefix of the prompt is cached; the rest of it is as long at all levels.
    "hits": Axis(
        units="cached tokens of an arriving prompt",
        per_unit="1,000 cached tokens of an arriving prompt",
        per=1_000,
        margin_us=6.0,
        levels=(0, 2_048, 4_096, 8_064),
    ),
    # What is moved lies in so many places: one descriptor each, where they are merged.
    "fragments": Axis(
        units="fragments per arriving request of 64 blocks",
        per_unit="fragment",
        per=1,
        margin_us=0.8,
        levels=(1, 16, 32, 64),
        alike=True,
    ),
    # Only of connectors with a tier of their own that can be emptied.
    "tier": Axis(
        units="blocks in the connector's tier",
        per_unit="1,000 blocks in the tier",
        per=1_000,
        margin_us=3.0,
        levels=(0, 4_096, 8_192, 16_384),
        alike=True,
    ),
    # A cost may need both: a cache and a large batch.
    "cache_at_32": Axis(
        units="cached blocks with 32 running requests",
        per_unit="1,000 cached blocks with 32 running requests",
        per=1_000,
        margin_us=3.0,
        levels=(256, 8_192, 16_384),
        alike=True,
        ages=True,
    ),
}


def require_axes(names: Iterable[str]) -> None:
    """Raise ValueError for a name that is no axis."""
    if unknown := [name for name in names if name not in AXES]:
        raise ValueError(f"no axis {', '.join(unknown)}; there are {', '.join(AXES)}")


# Range of the exponent, in the fit a + b x^p, of the shapes that it tells apart.
EXPONENTS: dict[Shape, tuple[float, float]] = {
    "linear": (0.6, 1.4),
    "curved": (1.6, 2.4),
}
# Verdicts hold in so many of cells.
LEVEL = 0.95
# A hold was disturbed if the rest of its steps took so many times the level's median.
DISTURBED = 1.1
# All calls of the connector, in place of a method.
ALL = "connector"
# CPU time beside the engine's thread, in place of a method.
BESIDE = ("threads", "processes")
# A step is slow if the connector takes so much more than in half of the hold's steps.
SLOW_US = 1_000.0
RARE: Literal["rare"] = "rare"


@dataclass(frozen=True)
class Growth:
    """`level_us` are the medians over the passes, one per level of `levels`.

    `last` is the level's cost at the end, and `slope` in us per step and `Axis.per`.
    `shape` and `exponent` are None unless the line rises above the margin, and the
    shape if it is not known; RARE if only the number of slow steps grows. `passes` is
    how many they are known from.
    """

    levels: list[int]
    level_us: list[float]
    last: Estimate
    slope: Estimate
    verdict: Verdict
    shape: Shape | Literal["rare"] | None
    exponent: Estimate | None
    passes: int

    @property
    def rises(self) -> bool:
        """Return whether it grows, along the axis or with time."""
        return self.verdict in ("grows", "drifts")

    @property
    def words(self) -> str:
        """The verdict, and how it grows."""
        if self.verdict == "drifts":
            return "grows with time"
        if self.verdict != "grows":
            return self.verdict
        if self.exponent is None and self.shape is None:
            return "grows, not in a line"
        return f"grows, {self.shape or 'shape not known'}"

    @property
    def markdown(self) -> str:
        """`words` with growth in bold."""
        return self.words.replace("grows", "**grows**")


def growth(cell: CellRecord, axis: str, time: str) -> Growth | None:
    """Fit `time` along `axis`; return None if the cell does not have it."""
    passes = cell.means_us.get(axis, {}).get(time)
    if not passes:
        return None
    us = np.array(passes)
    x = np.array(cell.levels[axis]) / AXES[axis].per
    fitted = fit(_holds(cell, axis, time, us, x))
    if fitted is None:
        return None
    margin_us, slope = AXES[axis].margin_us, _slope(fitted)
    verdict = judge_metric(fitted, LEVEL, margin_us * fitted.across).verdict
    power: Estimate | None = None
    shape: Shape | Literal["rare"] | None = None
    if verdict == "grows" and slope.low > margin_us:
        power = median_of_passes(np.array([exponent(x, of_pass) for of_pass in us]))
        shape = _shape(power)
    elif verdict != "grows" and time == f"{ALL}_us" and slow_steps_rise(cell, axis):
        verdict, shape = "grows", RARE
    return Growth(
        levels=cell.levels[axis],
        level_us=[float(median) for median in np.median(us, axis=0)],
        last=median_of_passes(us[:, -1]),
        slope=slope,
        verdict=verdict,
        shape=shape,
        exponent=power,
        passes=len(us),
    )


def slow_steps_rise(cell: CellRecord, axis: str) -> bool:
    """Return whether higher levels of `axis` certainly have more slow steps."""
    holds = cell.holds.get(axis)
    if holds is None:
        return False
    slow = np.array(holds.slow, float)
    x = np.tile(np.array(cell.levels[axis], float), len(slow))
    one_server = np.zeros(slow.size, np.int64)
    return chance_of_rise(slow.ravel(), x, one_server) < CHANCE


def whole(cell: CellRecord) -> str:
    """Name the time that a cell is about: all of its connector, or the scheduler's."""
    own = any(methods(cell, axis) for axis in cell.means_us)
    return f"{ALL}_us" if own else "scheduler_us"


def methods(cell: CellRecord, axis: str) -> list[str]:
    """List the times of single methods of the connector: `worker.get_finished_us`."""
    return [time for time in cell.means_us.get(axis, {}) if "." in time]


def times_beside(cell: CellRecord, axis: str) -> list[str]:
    """List the times of what the connector does beside the engine's thread."""
    times = [f"{name}_us" for name in BESIDE]
    return [time for time in times if time in cell.means_us.get(axis, {})]


def _holds(cell: CellRecord, axis: str, time: str, us: Floats, x: Floats) -> Holds:
    """Take the holds of a cell in which nothing disturbed the machine, pass by pass.

    Where vLLM's own work is the same at every level, a hold in which it took longer has
    its time as if it had not. Of an older cell it is not known when within a pass a
    level was held.
    """
    passes, levels = us.shape
    of_axis = cell.holds.get(axis)
    number = np.repeat(np.arange(passes), levels)
    time_s = number if of_axis is None else np.array(of_axis.time_s).ravel()
    age_s: Floats = np.zeros(us.size)
    if of_axis is not None and AXES[axis].ages:
        age_s = np.array(of_axis.age_s, float).ravel()
    # Of a step, the rest is a part.
    rest = None if time == "step_us" else _rest_us(cell, axis)
    kept = np.ones(us.size, bool)
    if rest is not None:
        kept = (rest <= DISTURBED * np.median(rest, axis=0)).ravel()
        if AXES[axis].alike:
            us = us * np.median(rest) / rest
    return Holds(
        server=np.zeros(us.size, np.int64)[kept],
        level=np.tile(np.arange(levels), passes)[kept],
        x=np.tile(x, passes)[kept],
        time_s=time_s.astype(float)[kept],
        age_s=age_s[kept],
        values=us.ravel()[kept],
    )


def _rest_us(cell: CellRecord, axis: str) -> Floats | None:
    """Return what steps take besides scheduler and connector, (passes, levels).

    None if it was not measured.
    """
    times = {time: np.array(us) for time, us in cell.means_us[axis].items()}
    if not {"step_us", "scheduler_us"} <= times.keys():
        return None
    in_worker = [us for time, us in times.items() if time.startswith("worker.")]
    rest: Floats = times["step_us"] - times["scheduler_us"] - sum(in_worker)
    return rest if (rest > 0).all() else None


def _slope(fitted: Fit) -> Estimate:
    slope, error = fitted.slope()
    reach = fitted.reach(error, LEVEL)
    return Estimate(slope, (slope - reach, slope + reach))


def _shape(power: Estimate) -> Shape | None:
    """Name the shape whose range has the whole interval of the exponent."""
    for shape, (low, high) in EXPONENTS.items():
        if low <= power.low and power.high <= high:
            return shape
    return None
