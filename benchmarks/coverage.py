# SPDX-License-Identifier: Apache-2.0
"""Count how often held levels tell the truth on real noise.

The noise is that of the committed sweeps: holds of the servers of configs in which
nothing grows. Each draw takes servers of one config, keeps their holds in order, deals
their passes the levels and ages of other passes, and adds a rise that is known. Then it
fits and judges as the sweep does. Prints Markdown, a row per metric: the share of 95 %
intervals that hold the truth, of slopes and of the differences of all pairs of levels;
and the share of false words, at the level of the sweep's looks: *grows* where nothing
does, *flat* of a rise of 1.5 margins, either of a rise of just the margin.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
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
from kvtax.stats.held import Fit, Holds, fit
from kvtax.stats.processes import look_level
from kvtax.verdict.analysis import judge
from kvtax.verdict.holds import as_holds, as_table
from kvtax.verdict.metrics import JUDGED, margin_of
from kvtax.verdict.verdict import judge_metric
from studies.results import at_least, publish

SWEEPS = (
    *sorted((REPOSITORY / "benchmarks" / "results" / "sweeps").glob("*.json.gz")),
    REPOSITORY / "evidence.json.gz",
)
AIM, MOST_FALSE = 0.93, 0.05
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
class Noise:
    """Servers of each config in which nothing grows: tables of holds, in order.

    `passes` are the levels, blocks and ages of passes, each in another order, and
    `verdict_level` the level at which the sweeps judge.
    """

    servers: dict[str, list[pl.DataFrame]]
    passes: list[pl.DataFrame]
    verdict_level: float

    @classmethod
    def of(cls, sweeps: list[Evidence]) -> Noise:
        """Take apart the holds of the sweeps."""
        servers: dict[str, list[pl.DataFrame]] = {}
        profile = sweeps[0].run.profile
        each = profile.load.ladder.holds_per_pass
        # Those with many requests last in each pass, wherever they were.
        in_passes = (pl.col("hold") // each, "many", "hold")
        for evidence in sweeps:
            configs = judge(evidence).document.configs
            for name, one in evidence.configs.items():
                if one.holds and configs[name].verdict != "grows":
                    own = as_table(one.holds).sort(in_passes).partition_by("repeat")
                    servers.setdefault(name, []).extend(own)
        held = [
            one.select(DEALT)
            for own in servers.values()
            for server in own
            for one in server.iter_slices(each)
        ]
        orders = {tuple(one["level"]): one for one in held}
        return cls(servers, list(orders.values()), look_level(profile.looks))

    def draw(self, config: str, servers: int, rng: np.random.Generator) -> pl.DataFrame:
        """Draw servers of a config, with the levels of passes that are drawn, too."""
        own = self.servers[config]
        drawn = rng.permutation(len(own))[:servers]
        return pl.concat(
            self._dealt(own[which], rng).with_columns(repeat=pl.lit(number, pl.Int64))
            for number, which in enumerate(drawn)
        )

    def _dealt(self, server: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
        count = server.height // self.passes[0].height
        drawn = rng.integers(len(self.passes), size=count)
        return server.with_columns(pl.concat([self.passes[one] for one in drawn]))


def risen(holds: Holds, truth: str, margin: float) -> tuple[Holds, Floats]:
    """Add a rise to the holds; return them and the rise of each level in us.

    A machine that was slow in a hold makes the rise longer by as much.
    """
    levels, level = np.unique(holds.level, return_inverse=True)
    x = np.array([holds.x[level == n].mean() for n in range(len(levels))])
    margins, when_full = TRUTHS[truth]
    share = (x == x[-1]) * 1.0 if when_full else (x - x[0]) / (x[-1] - x[0])
    rise_us = margins * margin * (x[-1] - x[0]) * share
    speed = np.array(holds.values if holds.control is None else holds.control)
    for server in np.unique(holds.server):
        speed[holds.server == server] /= speed[holds.server == server].mean()
    return replace(holds, values=holds.values + rise_us[level] * speed), rise_us


@dataclass
class Counts:
    """Intervals of a metric that hold the truth, and the words that were said.

    `words` are by truth, `slopes` and `pairs` a share for each fit.
    """

    slopes: list[float] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    words: dict[str, list[str]] = field(
        default_factory=lambda: {truth: [] for truth in TRUTHS}
    )

    def add(self, found: Fit, truth: str, rise_us: Floats, word: str) -> None:
        """Count a fit whose levels truly rise by `rise_us`."""
        slope, error = found.slope()
        off = abs(slope - float(np.polyfit(found.x, rise_us, 1)[0]))
        self.slopes.append(off <= found.reach(error, LEVEL))
        right = []
        for low, high in combinations(range(len(rise_us)), 2):
            rise, error = found.rise(low, high)
            off = abs(rise - (rise_us[high] - rise_us[low]))
            right.append(off <= found.reach(error, LEVEL))
        self.pairs.append(float(np.mean(right)))
        self.words[truth].append(word)

    @property
    def true(self) -> tuple[float, float]:
        """Shares of true intervals: of slopes, and of pairs of levels."""
        return float(np.mean(self.slopes)), float(np.mean(self.pairs))

    @property
    def false(self) -> list[float]:
        """Share of each of the words of FALSE."""
        words = self.words
        return [words[of].count(word) / len(words[of]) for of, word in FALSE]

    @property
    def misses(self) -> bool:
        """True if the metric misses the aim."""
        return min(self.true) < AIM or max(self.false) > MOST_FALSE


def count(noise: Noise, servers: int, runs: int) -> dict[str, Counts]:
    """Judge every metric of every config on so many draws of each truth."""
    rng, counts = np.random.default_rng(SEED), {name: Counts() for name in JUDGED}
    for config in noise.servers:
        for truth in TRUTHS:
            for _ in range(runs):
                drawn = noise.draw(config, servers, rng)
                for name, of_metric in counts.items():
                    if (holds := as_holds(drawn, name)) is None:
                        continue
                    holds, rise_us = risen(holds, truth, margin_of(name))
                    if (found := fit(holds)) is not None:
                        level = noise.verdict_level
                        judged = judge_metric(found, level, margin_of(name))
                        of_metric.add(found, truth, rise_us, judged.verdict)
    return {name: of_metric for name, of_metric in counts.items() if of_metric.slopes}


HEAD = ["metric", "fits", "slope", "pairs of levels"]
HEAD += [f"*{word}* of {truth}" for truth, word in FALSE]
HEAD += [""]


def row(name: str, found: Counts) -> list[str]:
    """Build the row of the table, in percent."""
    shares = [f"{100 * share:.1f}" for share in (*found.true, *found.false)]
    fits = f"{len(found.slopes):,}"
    return [f"`{name}`", fits, *shares, "misses" if found.misses else ""]


def of_nothing(counts: dict[str, Counts]) -> str:
    """Count the false *grows* of all metrics."""
    words = [word for found in counts.values() for word in found.words[NOTHING]]
    return (
        f"*Grows* of nothing: {words.count('grows')} of {len(words):,} cells of a "
        "config, a metric and levels drawn anew."
    )


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks coverage`."""
    parser.add_argument(
        "--runs", type=at_least(1), default=40, help="of each truth and config"
    )
    parser.add_argument("--servers", type=at_least(1), default=2, help="in a draw")
    parser.add_argument("--out", type=Path, default=Path("runs/coverage.md"))


def run(arguments: Namespace) -> int:
    """Measure, publish the result and return the exit code."""
    noise = Noise.of([read_document(file, Evidence) for file in SWEEPS])
    counts = count(noise, arguments.servers, arguments.runs)
    rows = [row(name, found) for name, found in counts.items()]
    distinct = sum(map(len, noise.servers.values()))
    note = (
        f"In %, on the noise of {distinct} servers of {len(noise.servers)} configs in "
        f"{len(SWEEPS)} sweeps; {arguments.servers} servers and {arguments.runs} draws "
        f"for each config and truth. A metric misses with less than {100 * AIM:.0f} of "
        f"the intervals true, or more than {100 * MOST_FALSE:.0f} of a false word. "
        + of_nothing(counts)
    )
    results = {"head": HEAD, "rows": rows, "note": note}
    return publish("coverage", arguments.out, [table(HEAD, rows), note], results, {})
