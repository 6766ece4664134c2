# SPDX-License-Identifier: Apache-2.0
"""The axes that a connector's cost per step may grow along, and growth along them.

One axis moves while the others are held: 8 running requests of 64 tokens, a prefix
cache that is nearly empty, no arrivals.

Each pass over the levels is a sample of its own. Slope and exponent are medians over
the passes, so that a pass that the machine spoilt does not widen the interval. A cost
that rises and falls again has no slope: levels are compared in pairs, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from kvtax.records.observatory_cell import CellRecord
from kvtax.records.run import Verdict
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats, rises, t_quantile
from kvtax.stats.held import Shape
from kvtax.stats.least_squares import exponent
from kvtax.stats.quantiles import median_of_passes


@dataclass(frozen=True)
class Axis:
    """`levels` in `units`; slopes are stated in us per step and `per` of them.

    A slope up to `margin_us` is no growth: some 50 us over the whole axis, or, per
    arrival, a small part of what vLLM's own scheduler takes.
    """

    units: str
    per_unit: str
    per: int
    margin_us: float
    levels: tuple[int, ...]


AXES = {
    "cache": Axis(
        units="cached blocks",
        per_unit="1,000 cached blocks",
        per=1_000,
        margin_us=3.0,
        levels=(256, 4_096, 8_192, 12_288, 16_384),
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
    # What is moved lies in so many places: one descriptor each, where they are merged.
    "fragments": Axis(
        units="fragments per arriving request of 64 blocks",
        per_unit="fragment",
        per=1,
        margin_us=0.8,
        levels=(1, 16, 32, 64),
    ),
    # Only of connectors with a tier of their own that can be emptied.
    "tier": Axis(
        units="blocks in the connector's tier",
        per_unit="1,000 blocks in the tier",
        per=1_000,
        margin_us=3.0,
        levels=(0, 4_096, 8_192, 16_384),
    ),
    # A cost may need both: a cache and a large batch.
    "cache_at_32": Axis(
        units="cached blocks with 32 running requests",
        per_unit="1,000 cached blocks with 32 running requests",
        per=1_000,
        margin_us=3.0,
        levels=(256, 8_192, 16_384),
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
# Family-wise error rate of the test of all pairs of levels.
ALPHA = 0.05
# All calls of the connector, in place of a method.
ALL = "connector"
# CPU time beside the engine's thread, in place of a method.
BESIDE = ("threads", "processes")
# A step is slow if the connector takes so much more than in half of the hold's steps.
SLOW_US = 1_000.0
# Probability of an error in the test of slow steps.
SLOW_ALPHA = 0.001
RARE: Literal["rare"] = "rare"


@dataclass(frozen=True)
class Growth:
    """`level_us` are the medians over the passes, one per level of `levels`.

    `last` is the level's cost at the end, and `slope` in us per step and `Axis.per`.
    `shape` and `exponent` are None unless the slope is above the margin, and the shape
    if it is not known; RARE if only the number of slow steps grows. `passes` is how
    many they are known from.
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
    def words(self) -> str:
        """The verdict, and how it grows."""
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
    slope = median_of_passes(np.array([np.polyfit(x, one, 1)[0] for one in us]))
    verdict = _against(slope, AXES[axis].margin_us)
    power: Estimate | None = None
    shape: Shape | Literal["rare"] | None = None
    if verdict == "grows":
        power = median_of_passes(np.array([exponent(x, one) for one in us]))
        shape = _shape(power)
    elif _a_pair_rises(AXES[axis], x, us):
        verdict = "grows"
    elif time == f"{ALL}_us" and slow_steps_rise(cell, axis):
        verdict, shape = "grows", RARE
    return Growth(
        levels=cell.levels[axis],
        level_us=[float(one) for one in np.median(us, axis=0)],
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
    return holds is not None and rises(np.array(holds.slow), SLOW_ALPHA)


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


def steepest(cell: CellRecord, axis: str) -> str | None:
    """Find the method that grows most along `axis`; None if none grows."""
    along = {time: growth(cell, axis, time) for time in methods(cell, axis)}
    rises = {
        time: max(found.level_us) - found.level_us[0]
        for time, found in along.items()
        if found and found.verdict == "grows"
    }
    return max(rises, key=rises.__getitem__, default=None)


def _against(slope: Estimate, margin: float) -> Verdict:
    """Judge by the side of the margin on which the whole interval lies."""
    if slope.low > margin:
        return "grows"
    return "flat" if slope.high < margin else "inconclusive"


def _a_pair_rises(axis: Axis, x: Floats, us: Floats) -> bool:
    """Return whether a level is certainly above a lower one by the whole axis' margin.

    By Student's t over the passes, all pairs at once (Bonferroni).
    """
    margin_us = axis.margin_us * float(x[-1] - x[0])
    pairs = list(combinations(range(len(x)), 2))
    rises = np.array([us[:, high] - us[:, low] for low, high in pairs])
    passes = len(us)
    reach = t_quantile(1 - ALPHA / len(pairs), passes - 1) / np.sqrt(passes)
    certain = rises.mean(axis=1) - reach * rises.std(axis=1, ddof=1)
    return bool((certain > margin_us).any())


def _shape(power: Estimate) -> Shape | None:
    """Name the shape whose range has the whole interval of the exponent."""
    for shape, (low, high) in EXPONENTS.items():
        if low <= power.low and power.high <= high:
            return shape
    return None
