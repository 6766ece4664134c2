# SPDX-License-Identifier: Apache-2.0
"""Scheduler-side costs that grow with requests or contexts, before and after a fix.

One process per fix has both versions of what the fix changes. For a connector it has
vLLM's real scheduler, too. In each decode-only step both connectors get what was
scheduled, in an order drawn anew, and build_connector_meta is timed, while nothing is
to be loaded and no worker is there. The number of running requests grows, or their
length. For the block pool, cache_full_blocks is timed on the first 2,048 tokens of
longer and longer prompts. Intervals are 95 %, from resampling rounds. Prints Markdown
and writes it with JSON.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec
import numpy as np

from kvtax.engine.installation import Installation
from kvtax.engine.releases import release
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import over_rounds, ratio
from studies.harness import main, publish, rows_table
from studies.results import Variant, at_least, configure_rounds, engines, turns

MIN_ROUNDS, MIN_STEPS = 4, 20
RELEASE = "0.32.0"
CONTEXTS = [1_024 * thousands for thousands in (4, 16, 64, 128)]
# What the null model needs on later releases.
ON_A_CPU = ["cpu_uniproc", "cpu_small_blocks"]
# The null model's own length is less than the longest context here.
ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


class Fix(NamedTuple):
    """(running requests, context tokens) of each case, and the worker's function."""

    cases: list[tuple[int, int]]
    function: str = "time_decode"
    block_tokens: int = 16


POOL_CASES = [(1, context) for context in CONTEXTS]
FIXES = {
    "mooncake_store_pending_loads": Fix(
        [(running, 64) for running in (1, 8, 32, 64, 128, 256)]
    ),
    "offloading_new_hashes_only": Fix([(8, context) for context in (1_024, *CONTEXTS)]),
    "block_pool_bounded_hashes": Fix(POOL_CASES, "time_first_chunk"),
    "block_pool_bounded_hashes, blocks of 64": Fix(POOL_CASES, "time_first_chunk", 64),
}


class Case(NamedTuple):
    """A fix, with so many running requests of such a length."""

    fix: str
    running_requests: int
    context_tokens: int


# By case, us: (rounds, 2, steps), before and after the fix.
Samples = dict[Case, Floats]


class Row(msgspec.Struct):
    """Medians over all steps; `before_times_after` compares rounds."""

    fix: str
    running_requests: int
    context_tokens: int
    rounds: int
    steps: int
    before_us: Estimate
    after_us: Estimate
    before_times_after: Estimate


def measure(
    name: str, installed: Installation, rounds: int, steps: int
) -> tuple[Samples, dict[str, str]]:
    """Time all cases of one fix; return the times, and the hashes of the patches."""
    fix, patch = FIXES[name], name.split(",")[0]
    samples: dict[Case, list[Floats]] = {Case(name, *case): [] for case in fix.cases}
    arguments = patch, str(fix.block_tokens)
    variant = {name: Variant([patch, *ON_A_CPU], arguments, ENV)}
    with engines("studies.growth.worker", variant, installed=installed) as processes:
        for _, case in turns(samples, rounds):
            times_us = processes[name].ask(fix.function, *case[1:], steps)
            samples[case].append(times_us)
        hashes = processes[name].patch_hashes
    return {case: np.array(of) for case, of in samples.items()}, hashes


def rows(samples: Samples) -> list[Row]:
    """Compute a row per case."""
    table_rows = []
    for case, times_us in samples.items():
        before, after = times_us[:, 0], times_us[:, 1]
        medians = np.median(before, axis=1), np.median(after, axis=1)
        table_rows.append(
            Row(
                *case,
                len(times_us),
                before.size,
                before_us=Estimate.of(over_rounds(before)),
                after_us=Estimate.of(over_rounds(after)),
                before_times_after=Estimate.of(ratio(*medians)),
            )
        )
    return table_rows


COLUMNS = {
    "fix": "`{row.fix}`",
    "running": "{row.running_requests:,}",
    "context, tokens": "{row.context_tokens:,}",
    "before, us": "{row.before_us:,.1f}",
    "after, us": "{row.after_us:,.1f}",
    "before / after": "{row.before_times_after:,.2f}",
    "steps": "{row.steps:,}",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.growth`."""
    parser.add_argument("--vllm", default=RELEASE, help=f"default {RELEASE}")
    parser.add_argument("--only", action="append", choices=FIXES)
    configure_rounds(parser, "growth", 12, MIN_ROUNDS)
    parser.add_argument(
        "--steps", type=at_least(MIN_STEPS), default=60, help="per round and case"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    installed = release(arguments.vllm)
    samples: Samples = {}
    hashes: dict[str, str] = {}
    for name in arguments.only or FIXES:
        times_us, used = measure(name, installed, arguments.rounds, arguments.steps)
        samples |= times_us
        hashes |= used
    found = rows(samples)
    parts, result = [rows_table(found, COLUMNS)], {"results": found}
    return publish("growth", arguments.out, parts, result, hashes, installed)


if __name__ == "__main__":
    main("growth", __doc__, configure, run)
