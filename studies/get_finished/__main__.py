# SPDX-License-Identifier: Apache-2.0
"""Cost of Mooncake's get_finished in a decode-only step, before and after the fix.

The no-op connector is the floor. Mooncake as kv_both is measured as upstream ships it
and with mooncake_get_finished_short_circuit. Each is a process of its own with an
engine on the null model, and nothing is transferred. There are three conditions:

- 1, 8 and 32 running requests;
- the same with a busy Python thread in the process: each wait for an event loop is
  then a wait for the GIL as well;
- sends that nobody pulls, which upstream looks through in every step.

One process at a time steps, in an order drawn anew each round. Intervals are 95 %, from
resampling rounds. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.results import Variant, at_least, configure_rounds, engines, turns
from kvtax.engine.engine_process import EngineProcess
from kvtax.engine.installation import installation
from kvtax.engine.releases import release
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import over_rounds
from kvtax.verdict.aims import Aim, aims_table
from studies.get_finished.worker import HELD_SENDS
from studies.harness import main, publish, rows_table

WORKER = "studies.get_finished.worker"
FLOOR, BEFORE, AFTER = "noop", "mooncake", "short-circuit"
NOTHING_PENDING = "nothing pending"
QUANTILES = {"p50": 0.5, "p99": 0.99}
# For the short circuit where nothing is pending, by quantile.
AIM_US = {"p50": 1.0, "p99": 3.0}
MIN_ROUNDS, MIN_STEPS = 4, 40
WARM_UP_SHARE = 0.25

# The last two are what the null model needs on later releases.
UNFIXED = ["mooncake_cpu_layout", "cpu_uniproc", "cpu_small_blocks"]
FIX = "mooncake_get_finished_short_circuit"
VARIANTS = {
    FLOOR: Variant(UNFIXED[1:], ("noop",)),
    BEFORE: Variant(UNFIXED, ("mooncake_both",)),
    AFTER: Variant([*UNFIXED, FIX], ("mooncake_both",)),
}


class Case(NamedTuple):
    """A condition under which all variants are measured."""

    name: str
    batch: int
    busy: bool
    # A share of --steps: with a busy thread a step takes a hundred times as long.
    share: float = 1.0


QUIET = [Case(NOTHING_PENDING, batch, False) for batch in (1, 8, 32)]
BUSY = [Case("busy thread", batch, True, 0.1) for batch in (1, 8, 32)]
# Last, as the sends are held until the process ends.
HELD = [Case(f"{HELD_SENDS} sends held", 8, False)]

# us by case and variant: (rounds, 2, steps), get_finished and the whole step.
Samples = dict[tuple[Case, str], Floats]


class Row(msgspec.Struct):
    """One variant in one case: quantiles of its steps by name, p50 and p99."""

    case: str
    running_requests: int
    variant: str
    rounds: int
    steps: int
    get_finished_us: dict[str, Estimate]
    step_us: dict[str, Estimate]


def measure(
    processes: dict[str, EngineProcess], cases: list[Case], rounds: int, steps: int
) -> Samples:
    """Time all variants in all cases."""
    samples: dict[tuple[Case, str], list[Floats]] = {}
    for case in cases:
        count = round(steps * case.share)
        warm_up = max(1, round(count * WARM_UP_SHARE))
        request = "time_parts", case.batch, count, warm_up, case.busy
        for _, name in turns(processes, rounds):
            samples.setdefault((case, name), []).append(processes[name].ask(*request))
    return {key: np.array(parts) for key, parts in samples.items()}


def rows(samples: Samples) -> list[Row]:
    """Compute a row per case and variant."""
    return [
        Row(
            case.name,
            case.batch,
            variant,
            len(times_us),
            times_us[:, 0].size,
            get_finished_us=quantiles(times_us[:, 0]),
            step_us=quantiles(times_us[:, 1]),
        )
        for (case, variant), times_us in samples.items()
    ]


def quantiles(times_us: Floats) -> dict[str, Estimate]:
    """Compute quantiles of `times_us`, (rounds, steps); rounds are resampled whole."""
    found = {}
    for name, q in QUANTILES.items():

        def quantile(of: Floats, q: float = q) -> float:
            return float(np.quantile(of, q))

        found[name] = Estimate.of(over_rounds(times_us, quantile))
    return found


COLUMNS = {
    "case": "{row.case}",
    "running": "{row.running_requests}",
    "connector": "{row.variant}",
    "steps": "{row.steps:,}",
    "get_finished p50 us": "{row.get_finished_us[p50]:,.2f}",
    "p99": "{row.get_finished_us[p99]:,.2f}",
    "step p50 us": "{row.step_us[p50]:,.1f}",
    "step p99 us": "{row.step_us[p99]:,.1f}",
}


def aims(found: list[Row]) -> str:
    """Return the table of the short circuit against its aims."""
    judged = []
    for row in found:
        if (row.variant, row.case) != (AFTER, NOTHING_PENDING):
            continue
        for name, aim_us in AIM_US.items():
            what = f"{AFTER}, {row.running_requests} running: get_finished {name}"
            aim = Aim(what=what, at_most=aim_us, unit="us")
            judged.append((aim, row.get_finished_us[name]))
    return aims_table(judged, ".2f")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.get_finished`."""
    parser.add_argument("--vllm", help="a release; default: the installed one")
    parser.add_argument("--quiet", action="store_true", help="nothing pending only")
    configure_rounds(parser, "get_finished", 12, MIN_ROUNDS)
    parser.add_argument(
        "--steps", type=at_least(MIN_STEPS), default=200, help="per round and case"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    installed = release(arguments.vllm) if arguments.vllm else installation()
    amount = arguments.rounds, arguments.steps
    with engines(WORKER, VARIANTS, installed=installed) as processes:
        hashes = processes[AFTER].patch_hashes
        cases = QUIET if arguments.quiet else QUIET + BUSY
        samples = measure(processes, cases, *amount)
        if not arguments.quiet:
            held = [processes[name].ask("hold_sends") for name in (BEFORE, AFTER)]
            if held == [HELD_SENDS, HELD_SENDS]:
                samples |= measure(processes, HELD, *amount)
            else:
                # Later releases may want more of a prompt that is to be pulled.
                print(f"held sends: left out, {held} are held", file=sys.stderr)
    found = rows(samples)
    results = {"results": found}
    out, parts = arguments.out, [rows_table(found, COLUMNS), aims(found)]
    return publish("get_finished", out, parts, results, hashes, installed)


if __name__ == "__main__":
    main("get_finished", __doc__, configure, run)
