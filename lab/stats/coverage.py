# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.stats.coverage`: how often intervals over processes hold the truth.

Made-up runs: 12 configs of R repeats each, whose true value is 0. A repeat's estimate
is off by noise within it, of standard deviation 1 and normal, and by what its process
has of its own, of `between` times that. The variance within is known as a jackknife of
10 parts knows it. What is printed is the share of intervals that hold 0, in percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lab.stats.estimate import SEED, Floats
from lab.stats.markdown import TIMES, table
from lab.stats.processes import (
    Repeats,
    Spread,
    look_level,
    over_processes,
    pooled,
    variance_of_mean,
)
from lab.stats.t_and_f import t_quantile

Held = NDArray[np.bool_]

AIM = 0.93
REPEATS = (2, 3, 5)
BETWEEN = (0.0, 0.5, 1.0, 3.0)
LOOKS = (2, 3, 4, 5)
PARTS = 10
LOGNORMAL = 0.5


def _lognormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Skewness 1.75; mean 0 and variance 1."""
    square = np.exp(LOGNORMAL**2)
    values = rng.lognormal(0, LOGNORMAL, shape)
    return (values - np.sqrt(square)) / np.sqrt((square - 1) * square)


def _t5(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Excess kurtosis 6; variance 1."""
    return rng.standard_t(5, shape) / np.sqrt(5 / 3)


NOISES: dict[str, Callable[..., Floats]] = {
    "normal": np.random.Generator.standard_normal,
    "lognormal": _lognormal,
    "t5": _t5,
}


@dataclass(frozen=True)
class Cell:
    """Runs of one kind. odd: how much more the first config's processes differ."""

    repeats: int
    between: float
    noise: str = "normal"
    configs: int = 12
    odd: float = 1.0
    runs: int = 4_000

    def draw(self, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Values and variances, (runs, configs, repeats)."""
        shape = (self.runs, self.configs, self.repeats)
        between = np.full((self.configs, 1), self.between)
        between[0] *= self.odd
        values = rng.normal(size=shape) + between * NOISES[self.noise](rng, shape)
        return values, rng.chisquare(PARTS - 1, shape) / (PARTS - 1)


def held(values: Floats, variances: Floats, level: float) -> Held:
    """(runs, configs): does each interval hold 0? As over_processes makes it."""
    repeats, configs = values.shape[-1], values.shape[-2]
    own, within = values.var(axis=-1, ddof=1), variances.mean(axis=-1)
    spread = pooled(own, within, np.full(configs, repeats - 1))
    of_run = replace(
        spread, between=spread.between[:, None], error=spread.error[:, None]
    )
    variance, df = variance_of_mean(own, within, repeats, of_run)
    bound = np.empty(df.shape)
    for each in np.unique(df):
        bound[df == each] = t_quantile((1 + level) / 2, int(each))
    return np.abs(values.mean(axis=-1)) <= bound * np.sqrt(variance)


def covered(cell: Cell, rng: np.random.Generator) -> tuple[float, float]:
    """The share of all intervals that hold the truth, and of the first config's."""
    found = held(*cell.draw(rng), 0.95)
    return float(found.mean()), float(found[:, 0].mean())


def differences_covered(cell: Cell, rng: np.random.Generator) -> float:
    """The same of the difference of two configs, by their draws."""
    values, variances = cell.draw(rng)
    own, within = values.var(axis=-1, ddof=1), variances.mean(axis=-1)
    spread = pooled(own, within, np.full(cell.configs, cell.repeats - 1))
    right = 0
    for run in range(cell.runs):
        of_run = Spread(spread.between[run], spread.error[run], spread.df)
        one, other = (
            over_processes(
                Repeats(values[run, config], variances[run, config], 1.0),
                of_run,
                seed=2 * run + config,
            )
            for config in (0, 1)
        )
        low, high = one.minus(other).ci95
        right += low <= 0 <= high
    return right / cell.runs


def looks_covered(cell: Cell, rng: np.random.Generator) -> float:
    """The share of configs for which no look, after 2, 3, 4 and 5 repeats, is wrong.

    So it is the least that any rule for when to stop can get. `repeats` is the last.
    """
    values, variances = cell.draw(rng)
    level = look_level(len(LOOKS))
    looks = [held(values[..., :n], variances[..., :n], level) for n in LOOKS]
    return float(np.all(looks, axis=0).mean())


def _percent(share: float) -> str:
    text = f"{100 * share:.1f}"
    return text if share >= AIM else f"**{text}**"


def _grid(show: Callable[[Cell], str], rows: tuple[int, ...] = REPEATS) -> str:
    head = ["noise", "R", *(f"between {of:g}{TIMES}" for of in BETWEEN)]
    cells = [
        [noise, str(repeats), *(show(Cell(repeats, of, noise)) for of in BETWEEN)]
        for noise in NOISES
        for repeats in rows
    ]
    return table(head, cells)


def main() -> None:
    rng = np.random.default_rng(SEED)

    def odd(cell: Cell) -> str:
        every, first = covered(replace(cell, odd=3.0), rng)
        return f"{_percent(every)} / {_percent(first)}"

    def alone(cell: Cell) -> str:
        return _percent(covered(replace(cell, configs=1, runs=20_000), rng)[0])

    def difference(cell: Cell) -> str:
        return _percent(differences_covered(replace(cell, runs=1_000), rng))

    sections = {
        "12 configs alike": _grid(lambda cell: _percent(covered(cell, rng)[0])),
        f"One of 12 differs 3 {TIMES} as much: all / that one": _grid(odd),
        "1 config alone": _grid(alone),
        "The difference of two of 12 configs": _grid(difference),
        "No look wrong after 2, 3, 4 and 5 repeats": _grid(
            lambda cell: _percent(looks_covered(cell, rng)), LOOKS[-1:]
        ),
    }
    print(f"Intervals that hold the truth, in %; bold: under {100 * AIM:.0f}.")
    for title, grid in sections.items():
        print(f"\n### {title}\n\n{grid}")


if __name__ == "__main__":
    main()
