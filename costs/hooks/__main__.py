# SPDX-License-Identifier: Apache-2.0
"""What the step records cost an engine step: unpatched, patched and off, and on.

Each variant is a process of its own with an engine on the null model (no-op connector,
forward of zero length). The unpatched one runs twice, and the difference of the two
is the noise floor. One process at a time steps, in an order drawn anew each round, so
that drift of the machine hits all alike. A round counts with its lower quartile: what
disturbs a step only ever adds to it. A cost is the median over the rounds of the
difference within a round, with a percentile bootstrap over the rounds.

The split is measured in the process that records: the connector's calls per layer, the
hooks of engine and worker, the timing of the connector's calls and the request records
are switched on and off there every few steps, so no two processes are compared. The
same hooks in a tight loop show what they cost with warm caches. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from costs.hooks.report import OFF, ON, VARIANTS, Floats, Samples, report
from lab.serving.engine_process import EngineProcess
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED

HOOK_LOOPS = 50
MIN_ROUNDS, MIN_STEPS = 8, 20
PATCHES = ["step_timing_v1", "step_timing_v2", "request_timing"]


def measure(rounds: int, steps: int, batch: int) -> Samples:
    """Run all variants side by side. Raises RuntimeError if one of them fails."""
    order = random.Random(SEED)
    variants: dict[str, list[Floats]] = {name: [] for name in VARIANTS}
    modes: dict[str, list[Floats]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                EngineProcess(
                    Path(folder, str(index)),
                    "costs.hooks.worker",
                    PATCHES if name in (OFF, ON) else [],
                    recording=name == ON,
                )
            )
            for index, name in enumerate(VARIANTS)
        }
        for engine in engines.values():
            engine.wait_ready()
        for number_of_round in range(rounds):
            for name in order.sample(VARIANTS, len(VARIANTS)):
                variants[name].append(engines[name].ask("time_steps", batch, steps))
            split = engines[ON].ask("time_modes", batch, steps, number_of_round)
            for name, times_us in split.items():
                modes.setdefault(name, []).append(times_us)
        hooks = engines[ON].ask("time_hooks", batch, HOOK_LOOPS)
        hooks |= engines[ON].ask("time_calls", HOOK_LOOPS)
    return Samples(
        {name: np.array(times_us) for name, times_us in variants.items()},
        {name: np.array(times_us) for name, times_us in modes.items()},
        hooks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.hooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=500, help="per round")
    parser.add_argument("--batch", type=int, default=8, help="running requests")
    arguments = parser.parse_args()
    rounds, steps, batch = arguments.rounds, arguments.steps, arguments.batch
    if rounds < MIN_ROUNDS or steps < MIN_STEPS or batch < 1:
        parser.error(f"at least {MIN_ROUNDS} rounds, {MIN_STEPS} steps, a batch of 1")

    exit_on_signals()
    try:
        samples = measure(rounds, steps, batch)
    except RuntimeError as error:
        sys.exit(str(error))
    print(report(samples))


if __name__ == "__main__":
    main()
