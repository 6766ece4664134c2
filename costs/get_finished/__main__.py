# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's get_finished costs a decode-only step, before and after the fix.

The no-op connector is the floor. Mooncake as kv_both is measured as upstream ships it
and with mooncake_get_finished_short_circuit. Each is a process of its own with an
engine on the null model, and nothing is transferred. There are three conditions:

- 1, 8 and 32 running requests;
- the same with a busy Python thread in the process: each wait for an event loop is
  then a wait for the GIL as well;
- sends that nobody pulls, which upstream looks through in every step.

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

import numpy as np

from costs.get_finished.report import (
    AFTER,
    BEFORE,
    FLOOR,
    NOTHING_PENDING,
    Case,
    Floats,
    Samples,
    report,
    rows,
)
from costs.results import write_result
from lab.serving import provenance
from lab.serving.engine_process import EngineProcess
from lab.serving.errors import ServerError
from lab.serving.installation import Installation, installation
from lab.serving.releases import release
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED

MIN_ROUNDS, MIN_STEPS = 4, 40
HELD_SENDS = 16
WARM_UP_SHARE = 0.25

LAYOUT, FIX = "mooncake_cpu_layout", "mooncake_get_finished_short_circuit"
# What the null model needs on later releases.
ON_A_CPU = ["cpu_uniproc", "cpu_small_blocks"]
# The connector's config, and the patches of its tree.
VARIANTS = {
    FLOOR: ("noop", []),
    BEFORE: ("mooncake_both", [LAYOUT]),
    AFTER: ("mooncake_both", [LAYOUT, FIX]),
}
QUIET = [Case(NOTHING_PENDING, batch, False) for batch in (1, 8, 32)]
BUSY = [Case("busy thread", batch, True, 0.1) for batch in (1, 8, 32)]
# Last, as the sends are held until the process ends.
HELD = [Case(f"{HELD_SENDS} sends held", 8, False)]


class Variants:
    """A process per variant, side by side; `samples` gets what they measure."""

    def __init__(self, folder: Path, stack: ExitStack, installed: Installation) -> None:
        self.engines = {
            name: stack.enter_context(
                EngineProcess(
                    folder / name,
                    "costs.get_finished.worker",
                    [*patches, *ON_A_CPU],
                    connector,
                    installed=installed,
                )
            )
            for name, (connector, patches) in VARIANTS.items()
        }
        for engine in self.engines.values():
            engine.wait_ready()
        self._order = random.Random(SEED)
        self._parts: dict[tuple[Case, str], list[Floats]] = {}

    def measure(self, cases: list[Case], rounds: int, steps: int) -> None:
        for case in cases:
            self._parts |= {(case, name): [] for name in self.engines}
        for _ in range(rounds):
            for case in cases:
                count = round(steps * case.share)
                warm_up = max(1, round(count * WARM_UP_SHARE))
                request = "time_parts", case.batch, count, warm_up, case.busy
                for name in self._order.sample(list(VARIANTS), len(VARIANTS)):
                    self._parts[case, name].append(self.engines[name].ask(*request))

    @property
    def samples(self) -> Samples:
        return {key: np.array(parts) for key, parts in self._parts.items()}


def measure(
    rounds: int, steps: int, installed: Installation, quiet: bool
) -> tuple[Samples, dict[str, str]]:
    """All cases, and the hashes of the patches. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        variants = Variants(Path(folder), stack, installed)
        variants.measure(QUIET, rounds, steps)
        if quiet:
            return variants.samples, variants.engines[AFTER].patch_hashes
        variants.measure(BUSY, rounds, steps)
        held = [
            variants.engines[name].ask("hold_sends", HELD_SENDS)
            for name in (BEFORE, AFTER)
        ]
        if held == [HELD_SENDS, HELD_SENDS]:
            variants.measure(HELD, rounds, steps)
        else:
            # Later releases may want more of a prompt that is to be pulled.
            print(f"held sends: left out, {held} are held", file=sys.stderr)
        return variants.samples, variants.engines[AFTER].patch_hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.get_finished",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm", help="a release; default: the installed one")
    parser.add_argument("--quiet", action="store_true", help="nothing pending only")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200, help="per round and case")
    parser.add_argument("--out", type=Path, default=Path("runs/step-cost.json"))
    arguments = parser.parse_args()
    if arguments.rounds < MIN_ROUNDS or arguments.steps < MIN_STEPS:
        parser.error(f"at least {MIN_ROUNDS} rounds and {MIN_STEPS} steps")

    exit_on_signals()
    try:
        installed = release(arguments.vllm) if arguments.vllm else installation()
        samples, patch_hashes = measure(
            arguments.rounds, arguments.steps, installed, arguments.quiet
        )
    except (RuntimeError, ServerError) as error:
        sys.exit(str(error))
    found = rows(samples)
    command = "python -m costs.get_finished"
    facts = provenance.collect(patch_hashes, command, installed)
    write_result(arguments.out, facts | {"results": found})
    print(report(found))


if __name__ == "__main__":
    main()
