# SPDX-License-Identifier: Apache-2.0
"""The smallest growth with |cache| that a sweep still catches, by its shape.

Takes the records of a run and adds a cost of known shape and size to those of configs
that do not grow. The rules of the sweep then judge each. Each draw takes other servers
of a config, where the run has more than --repeats of them, and other rare steps.
Prints Markdown: how often each cost was called *grows*, and how often *flat*.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from kvtax.records.run import RunRecord, Verdict
from kvtax.report.markdown import DASH, table
from kvtax.steps.trial_steps import THREAD
from kvtax.verdict.analysis import evidence_of, judge
from kvtax.verdict.trials import LoadedTrial, load_run
from studies.results import BadArguments, at_least, publish

POWER = 0.95
# 5 % of own work over a cache of 17,500 blocks, on a machine where that is 700 us.
MARGIN_US_PER_1K_BLOCKS = 2.0
# Columns of kvtax.steps.trial_steps that hold the CPU time of a part.
IN_STEP = ("overhead_us", "step_us")
IN_WORKER = ("connector_us", *IN_STEP)
# Not a column of the steps: it is added to each hold's CPU time.
IN_THREAD = ("threads_us",)
TIMES = ("connector_us", "overhead_us", "step_us")
# The shape: a cost of 1 in each step, by the share of the blocks that are cached.
Shape = Callable[[pl.Expr, int], pl.Expr]
BLOCKS_1K = pl.col("cache_blocks") / 1_000
RARELY = 1_000


def linear(share: pl.Expr, seed: int) -> pl.Expr:
    """Return the cost of a step that pays 1 us per 1,000 blocks."""
    return BLOCKS_1K


def every_third(share: pl.Expr, seed: int) -> pl.Expr:
    """Return the linear cost, paid by every third step for three."""
    return pl.when(pl.col("step_id") % 3 == 0).then(3 * BLOCKS_1K).otherwise(0.0)


def prefills(share: pl.Expr, seed: int) -> pl.Expr:
    """Return the linear cost of steps with prefill."""
    return pl.when("prefills").then(BLOCKS_1K).otherwise(0.0)


def rare(share: pl.Expr, seed: int) -> pl.Expr:
    """Return the linear cost, paid by a random step of 1,000 for all of them."""
    hit = pl.col("step_id").hash(seed) % RARELY == 0
    return pl.when(hit).then(RARELY * BLOCKS_1K).otherwise(0.0)


def from_half(share: pl.Expr, seed: int) -> pl.Expr:
    """Return a cost of 1 us from half of the blocks on."""
    return (share >= 0.5).cast(pl.Float64)


def when_full(share: pl.Expr, seed: int) -> pl.Expr:
    """Return a cost of 1 us when nearly all blocks are cached."""
    return (share > 0.985).cast(pl.Float64)


def saturating(share: pl.Expr, seed: int) -> pl.Expr:
    """Return a cost that is 1 us from a tenth of the blocks on."""
    return (share / 0.1).clip(upper_bound=1.0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost to add to the columns of each of `parts`, in several sizes.

    A size is in us, or with `per_1k` in us per 1,000 blocks; a rise of less than
    `margin_us_per_1k_blocks` over all blocks is none.
    """

    shape: Shape
    sizes: tuple[float, ...]
    parts: tuple[Sequence[str], ...] = (IN_WORKER,)
    per_1k: bool = True
    margin_us_per_1k_blocks: float = MARGIN_US_PER_1K_BLOCKS

    def grows(self, size: float, num_blocks: int) -> bool:
        """Return whether a cost of `size` rises by more than the margin."""
        range_1k = num_blocks / 1_000
        rise_us = size * len(self.parts) * (range_1k if self.per_1k else 1.0)
        return rise_us > self.margin_us_per_1k_blocks * range_1k


SLOPES = (1.0, 2.5, 3.0, 4.0, 6.0, 10.0)
COSTS: dict[str, Cost] = {
    "a call of the connector in each step": Cost(linear, SLOPES),
    "the same, three times as much in every third step": Cost(every_third, SLOPES),
    "the same, in each step with prefill alone": Cost(
        prefills,
        (5.0, 12.0, 15.0, 20.0, 30.0, 50.0),
        margin_us_per_1k_blocks=10.0,
    ),
    "a thread of its own": Cost(linear, SLOPES, (IN_THREAD,)),
    "a call, in one step of 1,000": Cost(rare, (5.0, 20.0, 50.0)),
    "a call, from half of the cache on": Cost(
        from_half, (25.0, 50.0, 100.0, 200.0), per_1k=False
    ),
    "a call, only when the cache is full": Cost(
        when_full, (50.0, 100.0, 300.0, 1_000.0), per_1k=False
    ),
    "a call, constant from a tenth of the cache on": Cost(
        saturating, (50.0, 100.0, 200.0), per_1k=False
    ),
}


def _has_connector(trial: LoadedTrial) -> bool:
    return trial.steps is not None and trial.steps["connector_us"].count() > 0


def draws(
    trials: list[LoadedTrial], repeats: int, count: int
) -> Iterator[list[LoadedTrial]]:
    """Yield `count` times `repeats` trials of each config, or all that there are."""
    rng = np.random.default_rng(0)
    by_config: dict[str, list[LoadedTrial]] = {}
    for trial in trials:
        if trial.steps is not None:
            by_config.setdefault(trial.config, []).append(trial)
    for _ in range(count):
        yield [
            own[index]
            for own in by_config.values()
            for index in rng.permutation(len(own))[:repeats]
        ]


def add(trial: LoadedTrial, cost: Cost, size: float, seed: int = 0) -> LoadedTrial:
    """Return the trial with a cost of `size` in its steps."""
    assert trial.facts is not None and trial.steps is not None
    share = pl.col("cache_blocks") / trial.facts.num_blocks
    us = size * cost.shape(share, seed + 1_000 * trial.repeat)
    times = Counter(time for part in cost.parts for time in part)
    grown = trial.steps.with_columns((pl.col(t) + times.pop(t, 0) * us) for t in TIMES)
    if not times or trial.readings is None:
        return dataclasses.replace(trial, steps=grown)
    place = ("repeat", "hold", "level")
    beside = trial.steps.group_by(place).agg(us.mean().alias(f"{THREAD}of its own"))
    readings = trial.readings.join(beside, on=place, how="left")
    return dataclasses.replace(trial, steps=grown, readings=readings)


def judge_config(trials: list[LoadedTrial], run: RunRecord) -> Verdict:
    """Judge the config of `trials` as the sweep does."""
    (name,) = {trial.config for trial in trials}
    return judge(evidence_of(run, trials, None)).document.configs[name].verdict


Verdicts = dict[str, dict[str, list[Verdict]]]


def verdicts_of(
    drawn: list[list[LoadedTrial]],
    flat: list[str],
    run: RunRecord,
    cost: Cost | None = None,
    size: float = 0.0,
) -> list[Verdict]:
    """Judge each config of `flat` in each draw, with `cost` added to its steps."""
    verdicts = []
    for seed, trials in enumerate(drawn):
        for name in flat:
            own = [trial for trial in trials if trial.config == name]
            if cost is not None:
                own = [add(trial, cost, size, seed) for trial in own]
            verdicts.append(judge_config(own, run))
    return verdicts


def report(
    nothing: list[Verdict], verdicts: Verdicts, num_blocks: int
) -> tuple[str, str]:
    """Build the table, a row per cost, and the false words beside it."""
    columns = max(len(cost.sizes) for cost in COSTS.values())
    rows, false = [], Counter[str]()
    for name, cost in COSTS.items():
        cells, caught = [], []
        for size in cost.sizes:
            of = verdicts[name][f"{size:g}"]
            grows, is_flat = of.count("grows") / len(of), of.count("flat") / len(of)
            cells.append(f"{size:g}: {grows:.0%} / {is_flat:.0%}")
            caught.append(grows >= POWER)
            kind = "above" if cost.grows(size, num_blocks) else "below"
            false[kind] += len(of)
            wrong: Verdict = "flat" if kind == "above" else "grows"
            false[wrong] += of.count(wrong)
        # From there on, every larger one is caught, too.
        sizes = (s for i, s in enumerate(cost.sizes) if all(caught[i:]))
        least = next(sizes, None)
        cells += [""] * (columns - len(cells))
        unit = "µs/1k" if cost.per_1k else "µs"
        rows.append([name, unit, *cells, DASH if least is None else f"{least:g}"])
    head = ["cost added to", "unit", *("size: grows / flat",) * columns]
    text = table([*head, f"smallest with {POWER:.0%}"], rows)
    note = (
        f"False *grows*: {nothing.count('grows')} of {len(nothing)} with nothing added "
        f"(*flat*: {nothing.count('flat')}), {false['grows']} of {false['below']} with "
        f"less than the margin. False *flat*: {false['flat']} of {false['above']} with "
        "more than the margin."
    )
    return text, note


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks power`."""
    parser.add_argument("run_dir", type=Path, help="a run of the sweep")
    parser.add_argument(
        "--flat",
        action="append",
        required=True,
        metavar="CONFIG",
        help="a config of the run that has a connector and does not grow (repeatable)",
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=1, help="servers per config"
    )
    parser.add_argument("--draws", type=at_least(1), default=1, help="of servers")
    parser.add_argument("--out", type=Path, default=Path("runs/power.md"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, publish the result and return the exit code."""
    record, trials = load_run(arguments.run_dir)
    flat = arguments.flat
    usable = [trial for trial in trials if trial.steps is not None]
    known = {trial.config for trial in usable if _has_connector(trial)}
    if missing := set(flat) - known:
        raise BadArguments(
            f"{arguments.run_dir}: no config with steps and a connector is named "
            f"{', '.join(sorted(missing))}"
        )
    drawn = list(draws(usable, arguments.repeats, arguments.draws))
    nothing = verdicts_of(drawn, flat, record)
    verdicts: Verdicts = {
        name: {
            f"{size:g}": verdicts_of(drawn, flat, record, cost, size)
            for size in cost.sizes
        }
        for name, cost in COSTS.items()
    }
    num_blocks = max(trial.facts.num_blocks or 0 for trial in usable if trial.facts)
    text, note = report(nothing, verdicts, num_blocks)
    count = (
        f"Of each cost {len(nothing)} verdicts: {len(drawn)} draws of up to "
        f"{arguments.repeats} servers of {len(flat)} configs."
    )
    results = {
        "run": record.provenance,
        "flat": flat,
        "repeats": arguments.repeats,
        "nothing": nothing,
        "verdicts": verdicts,
    }
    return publish("power", arguments.out, [text, note, count], results, {})
