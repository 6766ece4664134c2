# SPDX-License-Identifier: Apache-2.0
"""What a connector's scheduler side costs a decode-only step, before and after a fix.

One process per fix and vLLM release has vLLM's real scheduler and both versions of the
connector. In each step both get what was scheduled, in an order drawn anew, and
build_connector_meta is timed. The number of running requests grows, or their length.
Nothing is to be loaded, and no worker is there. Intervals are 95 %, from resampling
rounds, each with a scheduler of its own. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

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
OUT = Path("runs/growth.md")
RELEASES = ["0.22.1", "0.32.0"]
# Patch, and (running requests, context tokens) of each case.
FIXES = {
    "mooncake_store_pending_loads": [
        (running, 64) for running in (1, 8, 32, 64, 128, 256)
    ],
    "offloading_new_hashes_only": [
        (8, 1_024 * thousands) for thousands in (1, 4, 16, 64, 128)
    ],
}
# What the null model needs on later releases.
ON_A_CPU = ["cpu_uniproc", "cpu_small_blocks"]
# The null model's own length is less than the longest context here.
ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def measure(
    patch: str, version: str, installed: Installation, rounds: int, steps: int
) -> tuple[Samples, dict[str, str]]:
    """All cases of one fix, and the hashes of the patches. Raises RuntimeError."""
    cases = [Case(patch, version, *case) for case in FIXES[patch]]
    samples: dict[Case, list] = {case: [] for case in cases}
    order = random.Random(SEED)
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(
            Path(folder, "worker"),
            "costs.growth.worker",
            [patch, *ON_A_CPU],
            patch,
            env=ENV,
            installed=installed,
        ) as process,
    ):
        process.wait_ready()
        for _ in range(rounds):
            for case in order.sample(cases, len(cases)):
                sizes = case.running_requests, case.context_tokens
                samples[case].append(process.ask("time_decode", *sizes, steps))
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
            for patch in arguments.only or FIXES:
                found, used = measure(
                    patch, version, installed, arguments.rounds, arguments.steps
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
