# SPDX-License-Identifier: Apache-2.0
"""Count how often held levels tell the truth on real noise.

The noise is that of the committed sweeps: holds of the servers of configs in which
nothing grows. Each draw takes servers of one config of one sweep, keeps their holds in
order, deals their passes the levels and ages of other passes, and adds a rise that is
known. Then it fits and judges as the sweep does. Prints Markdown, a row per metric: the
share of 95 % intervals that hold the truth, of a full cache and of the differences of
all pairs of levels, the latter of the sweep where fewest do; and the share of false
words, at the level of the sweep's looks: *grows* where nothing does, *flat* of a rise
of 1.5 margins, either of a rise of just the margin.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl

from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.per_config import Evidence
from kvtax.report.markdown import table
from kvtax.stats.distribution import SEED, Floats
from kvtax.stats.held import Fit, Others, fit
from kvtax.stats.processes import look_level
from kvtax.verdict.analysis import judge
from kvtax.verdict.holds import metric_holds
from kvtax.verdict.metrics import METRICS
from kvtax.verdict.verdict import judge_metric
from studies.results import at_least, publish

SWEEPS = (
    *sorted((REPOSITORY / "benchmarks" / "results" / "sweeps").glob("*.json.gz")),
    REPOSITORY / "evidence.json.gz",
)
LEAST_TRUE, MOST_FALSE = 0.93, 0.05
LEVEL = 0.95
NOTHING = "nothing"
# How many margins the highest level truly lies above the lowest; whether all of it at
# the highest.
TRUTHS = {
    NOTHING: (0.0, False),
    "the margin": (1.0, False),
    "1.5 margins": (1.5, False),
    "1.5 margins, only when full": (1.5, True),
}
# Words that are false, by truth: at the margin itself, both are.
FALSE = [
    (NOTHING, "grows"),
    ("the margin", "grows"),
    ("the margin", "flat"),
    ("1.5 margins", "flat"),
    ("1.5 margins, only when full", "flat"),
]
DEALT = ("level", "cache_blocks", "age_s")


@dataclass(frozen=True)
class Sweep:
    """Tables of holds of the configs in which nothing grows, in order.

    `passes` are the levels, blocks and ages of passes, each in another order; `others`
    is by metric, `level` that at which the sweep judges.
    """

    servers: dict[str, list[pl.DataFrame]]
    passes: list[pl.DataFrame]
    others: dict[str, Others]
    level: float

    @classmethod
    def of(cls, evidence: Evidence) -> Sweep:
        """Take apart the holds of a sweep."""
        profile, analysis = evidence.run.profile, judge(evidence)
        each = profile.load.ladder.holds_per_pass
        # Those with many requests last in each pass, wherever they were.
        in_passes = (pl.col("hold") // each, "many", "hold")
        configs = analysis.document.configs
        tables = {
            name: holds.sort(in_passes)
            for name, holds in analysis.holds.items()
            if configs[name].verdict != "grows"
        }
        servers = {name: own.partition_by("repeat") for name, own in tables.items()}
        orders = {
            tuple(one_pass["level"]): one_pass.select(DEALT)
            for own in servers.values()
            for server in own
            for one_pass in server.iter_slices(each)
            if one_pass.height == each
        }
        others = {
            name: Others.of(
                holds
                for own in tables.values()
                if (holds := metric_holds(own, name)) is not None
            )
            for name in METRICS
        }
        level = look_level(profile.looks)
        return cls(servers, list(orders.values()), others, level)

    def draw(self, config: str, servers: int, rng: np.random.Generator) -> pl.DataFrame:
        """Draw servers of a config, with the levels of passes that are drawn, too."""
        own = self.servers[config]
        drawn = rng.permutation(len(own))[:servers]
        return pl.concat(
            self._dealt(own[which], rng).with_columns(repeat=pl.lit(number, pl.Int64))
            for number, which in enumerate(drawn)
        )

    def _dealt(self, server: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
        each = self.passes[0].height
        count = server.height // each
        drawn = rng.integers(len(self.passes), size=count)
        levels = pl.concat([self.passes[which] for which in drawn])
        return server.head(count * each).with_columns(levels)


@dataclass
class Counts:
    """Intervals of a metric that hold the truth, and the words that were said.

    `words` are by truth, `full` and `pairs` a share for each fit of each sweep.
    """

    full: dict[int, list[float]] = field(default_factory=dict)
    pairs: dict[int, list[float]] = field(default_factory=dict)
    words: dict[str, list[str]] = field(
        default_factory=lambda: {truth: [] for truth in TRUTHS}
    )

    def add(self, sweep: int, fitted: Fit, rises: Floats) -> None:
        """Count a fit whose levels truly rise by `rises`."""
        right = {
            (low, high): _is_true(fitted, rises, low, high)
            for low, high in combinations(range(len(rises)), 2)
        }
        self.full.setdefault(sweep, []).append(right[0, len(rises) - 1])
        share = float(np.mean(list(right.values())))
        self.pairs.setdefault(sweep, []).append(share)

    @property
    def true(self) -> tuple[float, float, float]:
        """Return shares of true intervals: of all sweeps, and of the worst."""
        full = [float(np.mean(values)) for values in self.full.values()]
        pairs = [float(np.mean(values)) for values in self.pairs.values()]
        return float(np.mean(full)), float(np.mean(pairs)), min(pairs)

    @property
    def false(self) -> list[float]:
        """Return the share of each of the words of FALSE."""
        words = self.words
        return [words[of].count(word) / len(words[of]) for of, word in FALSE]

    @property
    def misses(self) -> bool:
        """Return whether the metric misses what is required."""
        return min(self.true) < LEAST_TRUE or max(self.false) > MOST_FALSE


def _is_true(fitted: Fit, rises: Floats, low: int, high: int) -> float:
    rise, error = fitted.rise(low, high)
    off = abs(rise - (rises[high] - rises[low]))
    return float(off <= fitted.reach(error, LEVEL))


def count(sweeps: list[Sweep], servers: int, runs: int) -> dict[str, Counts]:
    """Judge every metric of every config on so many draws of each truth."""
    rng, counts = np.random.default_rng(SEED), {name: Counts() for name in METRICS}
    for number, sweep in enumerate(sweeps):
        for config in sweep.servers:
            for truth in TRUTHS:
                for _ in range(runs):
                    drawn = sweep.draw(config, servers, rng)
                    for name, of_metric in counts.items():
                        for fitted, rises in _fits(drawn, name, truth, sweep):
                            of_metric.add(number, fitted, rises)
                            margin = METRICS[name].margin
                            word = judge_metric(fitted, sweep.level, margin).verdict
                            of_metric.words[truth].append(word)
    return {name: of_metric for name, of_metric in counts.items() if of_metric.full}


def _fits(
    drawn: pl.DataFrame, name: str, truth: str, sweep: Sweep
) -> Iterator[tuple[Fit, Floats]]:
    """Yield the fit of a metric with the rise of each level, if there is a fit."""
    holds = metric_holds(drawn, name)
    if holds is None or not holds.values.any():
        return
    levels, level = np.unique(holds.level, return_inverse=True)
    x = np.array([holds.x[level == n].mean() for n in range(len(levels))])
    if len(x) < 2 or x[-1] <= x[0]:
        return
    margins, when_full = TRUTHS[truth]
    share = (x == x[-1]) * 1.0 if when_full else (x - x[0]) / (x[-1] - x[0])
    rises = margins * METRICS[name].margin * share
    risen = replace(holds, values=holds.values + rises[level])
    if (fitted := fit(risen, sweep.others[name])) is not None:
        yield fitted, rises


HEAD = ["metric", "fits", "a full cache", "pairs of levels", "worst sweep"]
HEAD += [f"*{word}* of {truth}" for truth, word in FALSE]
HEAD += [""]


def row(name: str, counts: Counts) -> list[str]:
    """Build the row of the table, in percent."""
    shares = [f"{100 * share:.1f}" for share in (*counts.true, *counts.false)]
    fits = f"{sum(map(len, counts.full.values())):,}"
    return [f"`{name}`", fits, *shares, "misses" if counts.misses else ""]


def of_nothing(counts: dict[str, Counts]) -> str:
    """Count the false *grows* of all metrics."""
    words = [word for of in counts.values() for word in of.words[NOTHING]]
    return (
        f"*Grows* of nothing: {words.count('grows')} of {len(words):,} cells of a "
        "config, a metric and levels dealt anew."
    )


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the benchmark."""
    parser.add_argument(
        "--runs", type=at_least(1), default=10, help="of each truth and config"
    )
    parser.add_argument("--servers", type=at_least(1), default=2, help="in a draw")
    parser.add_argument("--out", type=Path, default=Path("runs/coverage.md"))


def run(arguments: Namespace) -> int:
    """Measure, publish the result and return the exit code."""
    sweeps = [Sweep.of(read_document(file, Evidence)) for file in SWEEPS]
    counts = count(sweeps, arguments.servers, arguments.runs)
    rows = [row(name, of_metric) for name, of_metric in counts.items()]
    distinct = sum(len(own) for sweep in sweeps for own in sweep.servers.values())
    note = (
        f"In %, on the noise of {distinct} servers in {len(SWEEPS)} sweeps; "
        f"{arguments.servers} servers and {arguments.runs} draws for each config and "
        f"truth. A metric misses with less than {100 * LEAST_TRUE:.0f} of the "
        f"intervals true in any sweep, or more than {100 * MOST_FALSE:.0f} of a false "
        f"word. {of_nothing(counts)}"
    )
    results = {"head": HEAD, "rows": rows, "note": note}
    return publish("coverage", arguments.out, [table(HEAD, rows), note], results, {})
