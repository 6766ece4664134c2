# SPDX-License-Identifier: Apache-2.0
"""What grows on the scheduler's side costs, before and after a fix.

One process per fix and vLLM release has both versions of what the fix changes. For a
connector it has vLLM's real scheduler, too. In each decode-only step both connectors
get what was scheduled, in an order drawn anew, and build_connector_meta is timed, while
nothing is to be loaded and no worker is there. The number of running requests grows, or
their length. For the block pool, cache_full_blocks is timed on the first 2,048 tokens
of longer and longer prompts. Intervals are 95 %, from resampling rounds. Prints
Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from costs.growth.report import Case, Samples, report, rows
from costs.results import facts_list, write_result
from lab.serving import provenance
from lab.serving.engine_process import EngineProcess
from lab.serving.errors import ServerError
from lab.serving.installation import Installation
from lab.serving.releases import release
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED

MIN_ROUNDS, MIN_STEPS = 4, 20


class Fix(NamedTuple):
    """(running requests, context tokens) of each case, and what the worker is asked."""

    cases: list[tuple[int, int]]
    function: str = "time_decode"
    block_tokens: int = 16


OUT = Path("runs/growth.md")
RELEASES = ["0.22.1", "0.32.0"]
CONTEXTS = [1_024 * thousands for thousands in (4, 16, 64, 128)]
FIXES = {
    "mooncake_store_pending_loads": Fix(
        [(running, 64) for running in (1, 8, 32, 64, 128, 256)]
    ),
    "offloading_new_hashes_only": Fix([(8, context) for context in (1_024, *CONTEXTS)]),
    "block_pool_bounded_hashes": Fix(
        [(1, context) for context in CONTEXTS], "time_first_chunk"
    ),
    "block_pool_bounded_hashes, blocks of 64": Fix(
        [(1, context) for context in CONTEXTS], "time_first_chunk", 64
    ),
}
# What the null model needs on later releases.
ON_A_CPU = ["cpu_uniproc", "cpu_small_blocks"]
# The null model's own length is less than the longest context here.
ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def measure(
    name: str, version: str, installed: Installation, rounds: int, steps: int
) -> tuple[Samples, dict[str, str]]:
    """All cases of one fix, and the hashes of the patches. Raises RuntimeError."""
    fix, patch = FIXES[name], name.split(",")[0]
    cases = [Case(name, version, *case) for case in fix.cases]
    samples: dict[Case, list] = {case: [] for case in cases}
    order = random.Random(SEED)
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(
            Path(folder, "worker"),
            "costs.growth.worker",
            [patch, *ON_A_CPU],
            patch,
            str(fix.block_tokens),
            env=ENV,
            installed=installed,
        ) as process,
    ):
        process.wait_ready()
        for _ in range(rounds):
            for case in order.sample(cases, len(cases)):
                sizes = case.running_requests, case.context_tokens
                samples[case].append(process.ask(fix.function, *sizes, steps))
        return {case: np.array(of) for case, of in samples.items()}, (
            process.patch_hashes
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm", action="append", help=f"default {RELEASES}")
    parser.add_argument("--only", action="append", choices=FIXES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60, help="per round and case")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.rounds < MIN_ROUNDS or arguments.steps < MIN_STEPS:
        parser.error(f"at least {MIN_ROUNDS} rounds and {MIN_STEPS} steps")

    exit_on_signals()
    samples: Samples = {}
    facts = {}
    try:
        for version in arguments.vllm or RELEASES:
            installed, hashes = release(version), {}
            for name in arguments.only or FIXES:
                found, used = measure(
                    name, version, installed, arguments.rounds, arguments.steps
                )
                samples |= found
                hashes |= used
            command = "python -m costs.growth"
            facts[version] = provenance.collect(hashes, command, installed)
    except (RuntimeError, ServerError) as error:
        sys.exit(str(error))
    found_rows = rows(samples)
    text = report(found_rows)
    print(text)
    machine = "\n\n".join(map(facts_list, facts.values()))
    write_result(
        arguments.out,
        {"provenance": facts, "results": found_rows},
        f"# costs.growth\n\n{text}\n\n{machine}\n",
    )


if __name__ == "__main__":
    main()
