# SPDX-License-Identifier: Apache-2.0
"""What a connector adds to schedule(), paired inside one process, and where.

Two processes of the same vLLM differ by more than a connector that does little costs.
So each process has one engine on the null model, whose connector is exchanged every few
steps: its own, the no-op one, the no-op one again (the noise), and the no-op one while
the block pool has its listeners (what being listened to costs). The load is the default
sweep's: a full cache, five requests of some 4,000 tokens, a forward of 2 ms.

One process at a time steps, in an order drawn anew each round. Intervals are 95 %, from
resampling rounds. Prints Markdown and writes JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from costs.results import write_result
from costs.schedule.report import Process, Samples, report, rows
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.engine_process import EngineProcess
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED

CONFIGS = ("noop", "mooncake_both", "mooncake_both_fixed", "direct_read_idle")
PROCESSES = 2
CHUNKS = 10
FORWARD_US = 2_000
MIN_ROUNDS = 4
# All trees have it: the process of each config can then say what a listener costs.
LISTENER = "block_pool_delta_listener"


def start(folder: Path, config: str, stack: ExitStack) -> EngineProcess:
    """A process of `config`, without the step records."""
    told = load_connector(config)
    patches = [name for name in told.patches if not name.startswith("step_timing")]
    if LISTENER not in patches:
        patches.append(LISTENER)
    worker = "costs.schedule.worker"
    return stack.enter_context(
        EngineProcess(
            folder, worker, patches, config, env=told.env, forward_us=FORWARD_US
        )
    )


def measure(rounds: int) -> tuple[Samples, dict[str, str]]:
    """All processes' times, and the hashes of the patches. Raises RuntimeError."""
    order = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {}
        for number in range(PROCESSES):
            for config in CONFIGS:
                place = Path(folder, f"{config}-{number}")
                engines[Process(config, number)] = start(place, config, stack)
        for engine in engines.values():
            engine.wait_ready()
        samples: Samples = {process: [] for process in engines}
        for number in range(rounds):
            for process in order.sample(list(engines), len(engines)):
                times_us = engines[process].ask("time_modes", CHUNKS, number)
                samples[process].append(times_us)
        hashes: dict[str, str] = {}
        for engine in engines.values():
            hashes |= engine.patch_hashes
        return samples, hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.schedule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("runs/schedule-cost.json"))
    arguments = parser.parse_args()
    if arguments.rounds < MIN_ROUNDS:
        parser.error(f"at least {MIN_ROUNDS} rounds")
    exit_on_signals()
    try:
        samples, patch_hashes = measure(arguments.rounds)
    except RuntimeError as error:
        sys.exit(str(error))
    found = rows(samples)
    facts = provenance.collect(patch_hashes, "python -m costs.schedule")
    write_result(arguments.out, facts | {"results": found})
    print(report(found, samples))


if __name__ == "__main__":
    main()
