# SPDX-License-Identifier: Apache-2.0
"""A connector's addition to schedule() by part, paired inside one process.

Two processes of the same vLLM differ by more than a connector that does little costs.
So each process has one engine on the null model, whose connector is exchanged every few
steps: its own, the no-op one, the no-op one again (the noise), and the no-op one while
the block pool has its listeners (what being listened to costs). The load is the default
sweep's: a full cache, five requests of some 4,000 tokens, a forward of 2 ms.

One process at a time steps, in an order drawn anew each round. Intervals are 95 %, from
resampling rounds. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.results import Variant, configure_rounds, engines, publish, turns
from kvtax.engine.connector import load_connector
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.markdown import TIMES, number, table
from kvtax.stats.resampling import difference, ratio

CONFIGS = ("noop", "mooncake_both", "mooncake_both_fixed", "direct_read_idle")
PROCESSES = 2
CHUNKS = 10
FORWARD_US = 2_000
MIN_ROUNDS = 4
# All processes have it: the process of each config can then say what a listener costs.
LISTENER = "block_pool_delta_listener"

# The connectors that take turns within a process: the process's own and the no-op one.
FLOOR, AGAIN, LISTENED, OWN = "no-op", "no-op again", "no-op, listened", "own"
QUANTILES = {"p50": 0.5, "p90": 0.9}


class Process(NamedTuple):
    """The `number`-th process of a config."""

    config: str
    number: int


# By process, a round's times by mode, (3, steps) us: schedule() before, in and after
# build_connector_meta.
Samples = dict[Process, list[dict[str, Floats]]]


def measure(rounds: int) -> tuple[Samples, dict[str, str]]:
    """Time all processes; return the times, and the hashes of the patches."""
    connectors = {config: load_connector(config) for config in CONFIGS}
    variants = {
        Process(config, number): Variant(
            # Without the step records.
            [p for p in connectors[config].patches if not p.startswith("step_timing")]
            + [LISTENER] * (LISTENER not in connectors[config].patches),
            (config,),
            connectors[config].env,
        )
        for number in range(PROCESSES)
        for config in CONFIGS
    }
    with engines(
        "benchmarks.schedule_worker", variants, forward_us=FORWARD_US
    ) as processes:
        samples: Samples = {process: [] for process in processes}
        for number, process in turns(processes, rounds):
            times_us = processes[process].ask("time_modes", CHUNKS, number)
            samples[process].append(times_us)
        hashes: dict[str, str] = {}
        for engine in processes.values():
            hashes |= engine.patch_hashes
        return samples, hashes


class Row(msgspec.Struct):
    """Time of a part of schedule() with the no-op connector, and the addition of
    each other mode. `noop_us` and `own_times_noop` are by quantile, `more_us` by
    quantile and mode."""

    config: str
    part: str
    rounds: int
    noop_us: dict[str, float]
    more_us: dict[str, dict[str, Estimate]]
    own_times_noop: dict[str, Estimate]


def parts_us(times_us: Floats) -> dict[str, Floats]:
    """Split (3, steps) into (steps,) by part."""
    before, build_meta, after = times_us
    return {
        "schedule()": before + build_meta + after,
        "build_connector_meta": build_meta,
        "the rest": before + after,
    }


def rows(samples: Samples) -> list[Row]:
    """Compute a row per config and part."""
    table_rows = []
    for config in dict.fromkeys(process.config for process in samples):
        rounds = [r for p, of in samples.items() if p.config == config for r in of]
        table_rows += [
            _row(config, part, rounds) for part in parts_us(np.zeros((3, 1)))
        ]
    return table_rows


def _row(config: str, part: str, rounds: list[dict[str, Floats]]) -> Row:
    levels = {
        name: {
            mode: np.array([np.quantile(parts_us(of[mode])[part], q) for of in rounds])
            for mode in rounds[0]
        }
        for name, q in QUANTILES.items()
    }
    return Row(
        config,
        part,
        len(rounds),
        {name: float(np.median(us[FLOOR])) for name, us in levels.items()},
        {
            name: {
                mode: Estimate.of(difference(us[mode], us[FLOOR]))
                for mode in (AGAIN, LISTENED, OWN)
            }
            for name, us in levels.items()
        },
        {name: Estimate.of(ratio(us[OWN], us[FLOOR])) for name, us in levels.items()},
    )


def report(found: list[Row], samples: Samples) -> list[str]:
    """Return two Markdown tables."""
    head = ["config", "part", "no-op p50 µs", "more: no-op again"]
    head += ["listened", "own", f"own {TIMES} no-op", "p90: no-op again", "own"]
    body = []
    for row in found:
        p50, p90 = (row.more_us[name] for name in QUANTILES)
        body.append(
            [
                f"`{row.config}`",
                row.part,
                number(row.noop_us["p50"]),
                *(f"{p50[mode]:+.1f}" for mode in (AGAIN, LISTENED, OWN)),
                f"{row.own_times_noop['p50']:.3f}",
                *(f"{p90[mode]:+.1f}" for mode in (AGAIN, OWN)),
            ]
        )
    return [table(head, body), _processes_table(samples)]


def _processes_table(samples: Samples) -> str:
    """Tabulate p50 of schedule() in each process while it has the no-op connector."""
    body = []
    for process, rounds in samples.items():
        steps = np.concatenate([parts_us(of[FLOOR])["schedule()"] for of in rounds])
        cells = [number(float(np.median(steps))), f"{len(steps):,}"]
        body.append([f"`{process.config}`", str(process.number), *cells])
    head = ["process of", "number", "schedule() with the no-op connector, p50 µs"]
    return table([*head, "steps"], body)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench schedule`."""
    configure_rounds(parser, "schedule", 16, MIN_ROUNDS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    samples, hashes = measure(arguments.rounds)
    results = rows(samples)
    parts = report(results, samples)
    return publish("schedule", arguments.out, parts, {"results": results}, hashes)
