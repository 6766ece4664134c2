# SPDX-License-Identifier: Apache-2.0
"""Count how often levels that are held tell the truth: `kvtax bench coverage`.

Made-up servers hold |cache| at 5 levels in 4 passes, as the profile `cpu` does. A hold
takes about 300 us, with noise of 4 % that has one of several kinds. Prints Markdown:
the share of 95 % intervals that hold the truth, of slopes and of the differences of all
pairs of levels; and the share of false words: *grows* where nothing does, *flat* of a
rise of 1.5 margins, either of a rise of just the margin.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.results import at_least
from kvtax.report.markdown import table
from kvtax.stats.distribution import SEED, Floats, Ints
from kvtax.stats.held import Fit, Holds, fit
from kvtax.verdict.metrics import MARGIN_US_PER_1K_BLOCKS
from kvtax.verdict.verdict import judge_metric

AIM, MOST_FALSE = 0.93, 0.05
LEVEL = 0.95
SERVERS = (1, 2, 4)
PASSES = 4
X_1K = 18 * np.array([0.0, 0.3, 0.6, 0.92, 1.0])
HOLD_S = 0.5
BASE_US, NOISE = 300.0, 0.04
RISE_US = 1.5 * MARGIN_US_PER_1K_BLOCKS * float(X_1K[-1] - X_1K[0])
LINEAR = RISE_US * X_1K / X_1K[-1]
WHEN_FULL = RISE_US * (X_1K[-1] == X_1K)
# Correlation of neighbouring holds, and drift from pass to pass.
AUTOCORRELATION = 0.7
DRIFT = 0.02
# Speeds of a machine, and how rarely it changes them.
SLOW, CHANGES = 1.3, 0.1
# Share of the holds that something disturbs, and how much noisier they are.
DISTURBED, DISTURBED_NOISE = 0.3, 3.0
# Half of the margin.
SLOPES = MARGIN_US_PER_1K_BLOCKS / 2
# Per second since the reset.
AGING_US = 40.0
Noise = Callable[[np.random.Generator, int], Floats]


def _normal(rng: np.random.Generator, count: int) -> Floats:
    return rng.standard_normal(count)


def _t5(rng: np.random.Generator, count: int) -> Floats:
    """Excess kurtosis 6; variance 1."""
    return rng.standard_t(5, count) / np.sqrt(5 / 3)


def _autocorrelated(rng: np.random.Generator, count: int) -> Floats:
    """AR(1) over the holds; variance 1."""
    values = rng.standard_normal(count)
    own = np.sqrt(1 - AUTOCORRELATION**2)
    for place in range(1, count):
        values[place] = AUTOCORRELATION * values[place - 1] + own * values[place]
    return values


@dataclass(frozen=True)
class Kind:
    """Kind of noise; `two_speeds`: the machine changes its own; `drift` per pass.

    `disturbed` is the share of holds that are noisier. `slopes` is by how many us per
    1,000 blocks servers truly differ: standard deviation. `aging_us` is what is added
    per second since the last reset.
    """

    noise: Noise = _normal
    two_speeds: bool = False
    drift: float = 0.0
    disturbed: float = 0.0
    slopes: float = 0.0
    aging_us: float = 0.0


KINDS = {
    "normal": Kind(),
    "t5": Kind(_t5),
    "autocorrelated": Kind(_autocorrelated),
    "two speeds": Kind(two_speeds=True),
    "drift": Kind(drift=DRIFT),
    "disturbed holds": Kind(disturbed=DISTURBED),
    "age": Kind(aging_us=AGING_US),
    "all but normal": Kind(
        lambda rng, count: (_t5(rng, count) + _autocorrelated(rng, count)) / np.sqrt(2),
        two_speeds=True,
        drift=DRIFT,
        disturbed=DISTURBED,
    ),
    "servers differ": Kind(slopes=SLOPES),
}


def order(rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Draw the levels of a server's holds, and the age of the cache in each."""
    levels, ages, age = list[int](), list[float](), 0.0
    for _ in range(PASSES):
        more = [*range(len(X_1K)), rng.integers(len(X_1K))]
        for level in rng.permutation(more).tolist():
            age = 0.0 if levels and level < levels[-1] else age
            age += HOLD_S * rng.uniform(1.0, 1.6)
            levels.append(level)
            ages.append(age)
    return np.array(levels), np.array(ages)


def draw(kind: Kind, servers: int, rise_us: Floats, rng: np.random.Generator) -> Holds:
    """Draw the holds of a run.

    `rise_us` (levels,) is how far each level truly lies above the base.
    """
    orders = [order(rng) for _ in range(servers)]
    level, age_s = (np.concatenate(one) for one in zip(*orders, strict=True))
    per_server = len(level) // servers
    server = np.repeat(np.arange(servers), per_server)
    number = np.tile(np.arange(per_server), servers)
    noise = np.concatenate([kind.noise(rng, per_server) for _ in range(servers)])
    speed: Floats = np.ones(len(level))
    if kind.two_speeds:
        changed = np.cumsum(rng.random(len(level)) < CHANGES) + rng.integers(2)
        speed = np.asarray(SLOW ** (changed % 2.0), float)
        # Times are those at the mean speed of the run.
        speed /= np.exp(np.log(speed).mean())
    noise *= np.where(rng.random(len(level)) < kind.disturbed, DISTURBED_NOISE, 1.0)
    drift = kind.drift * number / (per_server / PASSES)
    offset = NOISE * rng.standard_normal(servers)[server]
    true_us = rise_us[level] + BASE_US * (1 + drift + offset) + kind.aging_us * age_s
    true_us += kind.slopes * rng.standard_normal(servers)[server] * X_1K[level]
    values = speed * (1 + NOISE * noise) * true_us
    x = X_1K[level] + rng.uniform(0, 0.1, len(level))
    return Holds(server, level, x, HOLD_S * number, age_s, values)


# By how much the levels truly rise.
TRUTHS = {
    "nothing": 0 * LINEAR,
    "the margin": LINEAR / 1.5,
    "1.5 margins": LINEAR,
    "1.5 margins, only when full": WHEN_FULL,
}
# Words that are false, by truth: at the margin itself, both are.
FALSE = [
    ("nothing", "grows"),
    ("the margin", "grows"),
    ("the margin", "flat"),
    ("1.5 margins", "flat"),
    ("1.5 margins, only when full", "flat"),
]


@dataclass(frozen=True)
class Shares:
    """Shares of true intervals in one cell, and of each of the words of FALSE."""

    slope: float
    pairs: float
    false: list[float]

    def misses(self) -> bool:
        """Return whether the cell misses the aim."""
        return min(self.slope, self.pairs) < AIM or max(self.false) > MOST_FALSE


def _true_slope(rise_us: Floats) -> float:
    return float(np.polyfit(X_1K, rise_us, 1)[0])


def _holds_slope(found: Fit, rise_us: Floats) -> bool:
    slope, error = found.slope()
    return abs(slope - _true_slope(rise_us)) <= found.reach(error, LEVEL)


def _holds_pairs(found: Fit, rise_us: Floats) -> float:
    """Return the share of the pairs of levels whose interval holds the truth."""
    right = []
    for low, high in combinations(range(len(rise_us)), 2):
        rise, error = found.rise(low, high)
        off = abs(rise - (rise_us[high] - rise_us[low]))
        right.append(off <= found.reach(error, LEVEL))
    return float(np.mean(right))


def shares(kind: Kind, servers: int, runs: int, rng: np.random.Generator) -> Shares:
    """Measure one cell on so many made-up runs of each truth."""
    words: dict[str, list[str]] = {}
    slopes, pairs = [], []
    for name, rise_us in TRUTHS.items():
        words[name] = []
        for _ in range(runs):
            found = fit(draw(kind, servers, rise_us, rng))
            assert found is not None
            words[name].append(judge_metric(found, LEVEL).verdict)
            slopes.append(_holds_slope(found, rise_us))
            pairs.append(_holds_pairs(found, rise_us))
    false = [words[truth].count(word) / runs for truth, word in FALSE]
    return Shares(float(np.mean(slopes)), float(np.mean(pairs)), false)


HEAD = ["noise", "servers", "slope", "pairs of levels"]
HEAD += [f"*{word}* of {truth}" for truth, word in FALSE]


def row(name: str, servers: int, cell: Shares) -> list[str]:
    """Build the row of the table, in percent."""
    figures = [f"{100 * n:.1f}" for n in (cell.slope, cell.pairs, *cell.false)]
    return [name, str(servers), *figures, "misses" if cell.misses() else ""]


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `kvtax bench coverage`."""
    parser.add_argument("--runs", type=at_least(1), default=300, help="of each truth")


def run(arguments: Namespace) -> int:
    """Print the shares of intervals that hold the truth and of false verdicts."""
    rng = np.random.default_rng(SEED)
    rows = [
        row(name, servers, shares(kind, servers, arguments.runs, rng))
        for name, kind in KINDS.items()
        for servers in SERVERS
    ]
    print(table([*HEAD, ""], rows))
    print(
        f"\nIn %, of {arguments.runs} runs of each truth. A cell misses with less than "
        f"{100 * AIM:.0f} of the intervals true, or more than {100 * MOST_FALSE:.0f} "
        "of a false word."
    )
    return 0
