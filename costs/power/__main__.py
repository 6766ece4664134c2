# SPDX-License-Identifier: Apache-2.0
"""How small a growth with |cache| does a sweep still catch?

Takes the records of a run and adds growth of a known slope to configs that have none.
The analysis then says of each what it is called. Each draw takes other servers of
every config, where the run has more than --repeats of them. Prints Markdown: how often
growth was called "grows", by where it is and how steep.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from lab.records.run import RunRecord
from lab.stats.markdown import table
from microbench.analysis.analysis import analyse
from microbench.analysis.trials import LoadedTrial, load_run

SLOPES = (1.0, 2.5, 3.0, 4.0, 6.0, 10.0)
POWER = 0.95
IN_CONNECTOR = ("connector_us", "overhead_us", "step_us")
IN_THREAD = ("threads_us",)


EACH_STEP = pl.lit(1.0)
EVERY_THIRD = pl.when(pl.col("step_id") % 3 == 0).then(3.0).otherwise(0.0)
PREFILLS = pl.col("prefills").cast(pl.Float64)

# Where: the times that grow, and how much of the growth each step has.
Place = tuple[Sequence[str], pl.Expr]
PLACES: dict[str, Place] = {
    "a call of the connector in each step": (IN_CONNECTOR, EACH_STEP),
    "the same, three times as much in every third step": (IN_CONNECTOR, EVERY_THIRD),
    "the same, in each step with prefill alone": (IN_CONNECTOR, PREFILLS),
    "a thread of its own": (IN_THREAD, EACH_STEP),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.power",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="a run of the sweep")
    parser.add_argument(
        "--flat",
        action="append",
        required=True,
        metavar="CONFIG",
        help="a config of the run that does not grow (repeatable)",
    )
    parser.add_argument("--repeats", type=int, default=2, help="servers per config")
    parser.add_argument("--draws", type=int, default=1, help="of servers")
    told = parser.parse_args()
    run, trials = load_run(told.run_dir)
    if missing := set(told.flat) - {trial.config for trial in trials}:
        parser.error(f"{told.run_dir}: no config named {', '.join(sorted(missing))}")
    drawn = list(draws(trials, told.repeats, told.draws))
    print(report(run, drawn, told.flat))


def draws(
    trials: list[LoadedTrial], repeats: int, count: int
) -> Iterator[list[LoadedTrial]]:
    """`count` runs of `repeats` trials of each config, or of all that there are."""
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


def report(run: RunRecord, drawn: list[list[LoadedTrial]], flat: list[str]) -> str:
    """One row for each place, one column for each slope."""
    rows = []
    for name, place in PLACES.items():
        shares = [share_caught(run, drawn, flat, place, slope) for slope in SLOPES]
        caught = [share >= POWER for share in shares]
        # From there on, every steeper one is caught, too.
        least = next((s for i, s in enumerate(SLOPES) if all(caught[i:])), None)
        cells = [f"{share:.0%}" for share in shares]
        rows.append([name, *cells, "-" if least is None else f"{least:g}"])
    head = ["growth in", *(f"{slope:g} µs/1k" for slope in SLOPES)]
    count = len(drawn) * len(flat)
    note = f'Share called "grows" of {count} ({len(drawn)} draws, {len(flat)} configs).'
    return table([*head, f"smallest with {POWER:.0%}"], rows) + "\n\n" + note


def share_caught(
    run: RunRecord,
    drawn: list[list[LoadedTrial]],
    flat: list[str],
    place: Place,
    slope: float,
) -> float:
    """How often one of `flat` that grows at `place` is called growing."""
    verdicts = []
    for trials in drawn:
        grown = [
            grow(trial, place, slope) if trial.config in flat else trial
            for trial in trials
        ]
        configs = analyse(run, grown, None).document.configs
        verdicts += [configs[name].verdict for name in flat]
    return verdicts.count("grows") / len(verdicts)


def grow(trial: LoadedTrial, place: Place, slope: float) -> LoadedTrial:
    """The trial with `slope` us per 1,000 cached blocks more at `place`."""
    times, share = place
    more_us = slope * pl.col("cache_blocks") / 1_000 * share
    grown = trial.steps.with_columns(pl.col(time) + more_us for time in times)
    return dataclasses.replace(trial, steps=grown)


if __name__ == "__main__":
    main()
