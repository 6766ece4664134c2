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
import gc
import sys
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.results import (
    Variant,
    at_least,
    configure_rounds,
    engines,
    publish,
    turns,
)
from kvtax.engine.engine_process import serve
from kvtax.engine.installation import Installation
from kvtax.engine.releases import release
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import over_rounds, ratio
from tests.harness.before_after import TimedTwin, before_and_after

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
    with engines("benchmarks.growth", variant, installed=installed) as processes:
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


def report(found: list[Row]) -> str:
    """Return the Markdown table."""
    body = [
        [
            f"`{row.fix}`",
            f"{row.running_requests:,}",
            f"{row.context_tokens:,}",
            f"{row.before_us:,.1f}",
            f"{row.after_us:,.1f}",
            f"{row.before_times_after:,.2f}",
            f"{row.steps:,}",
        ]
        for row in found
    ]
    head = ["fix", "running", "context, tokens", "before, us", "after, us"]
    return table([*head, "before / after", "steps"], body)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench growth`."""
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
    results = rows(samples)
    parts, results = [report(results)], {"results": results}
    return publish("growth", arguments.out, parts, results, hashes, installed)


# The worker: both versions of what a fix changes, timed in turn.

WARM_UP_STEPS = 20
# A chunk of a prompt that is computed in one step.
CHUNK_TOKENS = 2_048
HASH_TOKENS = 16


class BothVersions:
    """Modules before and after the fix `patch`, and how the pool's are timed."""

    def __init__(self, model: str, patch: str, block_tokens: str) -> None:
        from tests.harness.scheduler_alone import SUBJECTS

        self.model = Path(model)
        self.block_tokens = int(block_tokens)
        self.order = Random(0)
        self.subject = SUBJECTS.get(patch)
        module = self.subject.module if self.subject else "vllm.v1.core.block_pool"
        self.modules = before_and_after(module)
        for module in self.modules if self.subject else ():
            self.subject.prepare(module)


def time_decode(
    fix: BothVersions, running: int, context_tokens: int, steps: int
) -> Floats:
    """Time `build_connector_meta` before and after the fix: (2, steps) us.

    Both versions get what the scheduler gives in the same decode-only step, while
    `running` requests of `context_tokens` run and nothing is to be loaded.
    """
    from tests.harness.scheduler_alone import BLOCK_SIZE, LoneScheduler

    subject = fix.subject
    length = context_tokens + WARM_UP_STEPS + steps + BLOCK_SIZE
    lone = LoneScheduler(
        fix.model,
        subject.idle,
        lambda *configs: TimedTwin(
            *(subject.make(module, *configs) for module in fix.modules)
        ),
        subject.worker(),
        num_blocks=(running + 1) * (length // BLOCK_SIZE + 2),
        max_model_len=length,
        max_requests=running,
        max_batched_tokens=running * length,
    )
    for number in range(running):
        # No two share a block.
        prompt = [number // 900 + 1, number % 900 + 1] * (context_tokens // 2)
        lone.add(prompt, WARM_UP_STEPS + steps + 2)
    for _ in range(1 + WARM_UP_STEPS):
        lone.step()
    times_us = lone.core.connector.times_us
    times_us.clear()
    gc.collect()
    gc.disable()  # so that neither version pays for the other's garbage
    for _ in range(steps):
        output = lone.step()
        assert len(output.scheduled_cached_reqs.req_ids) == running
    gc.enable()
    return np.array(times_us).T


class Prompt:
    """A request as the pool sees it, with random hashes of its own."""

    def __init__(self, number: int, tokens: int) -> None:
        self.block_hashes = [
            f"{number}-{index}".encode().rjust(32)
            for index in range(tokens // HASH_TOKENS)
        ]


def time_first_chunk(
    fix: BothVersions, _running: int, context_tokens: int, steps: int
) -> Floats:
    """Time `cache_full_blocks` for a prompt's first chunk, before and after the fix.

    (2, steps) us: each step is another prompt of `context_tokens`.
    """
    blocks = CHUNK_TOKENS // fix.block_tokens
    times_us = np.zeros((2, steps))
    pools = [
        module.BlockPool(steps * blocks + 1, True, HASH_TOKENS)
        for module in fix.modules
    ]
    for step in range(steps):
        prompt = Prompt(step, context_tokens)
        for version in fix.order.sample((0, 1), 2):
            chunk = pools[version].get_new_blocks(blocks)
            began_ns = time.perf_counter_ns()
            pools[version].cache_full_blocks(
                prompt, chunk, 0, blocks, fix.block_tokens, 0
            )
            times_us[version, step] = (time.perf_counter_ns() - began_ns) / 1e3
    return times_us


if __name__ == "__main__":
    *options, socket = sys.argv[1:]
    serve(BothVersions(*options), socket, time_decode, time_first_chunk)
