# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's get_finished costs a decode-only step, before and after the fix.

The no-op connector is the floor, Mooncake as kv_both is measured as upstream ships it
and with mooncake_get_finished_short_circuit. Each is a process of its own with an
engine on the null model, and nothing is transferred: with 1, 8 and 32 running
requests; the same with a busy Python thread in the process, for which every wait on an
event loop is a wait for the GIL too; and with sends that nobody pulls, which upstream
looks through in every step. One process at a time steps, in an order drawn anew each
round. Intervals are 95 %, from resampling rounds. Prints Markdown, writes JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.serving import provenance
from lab.serving.engine_process import EngineProcess
from lab.serving.supervise import exit_on_signals
from lab.stats.markdown import number, table

Floats = NDArray[np.float64]

SEED = 20_240_731
BOOTSTRAPS = 400
MIN_ROUNDS, MIN_STEPS = 4, 40
HELD_SENDS = 16
WARM_UP_SHARE = 0.25
QUANTILES = {"p50": 0.5, "p99": 0.99}
AIM_US = {"p50": 1.0, "p99": 3.0}

LAYOUT, FIX = "mooncake_cpu_layout", "mooncake_get_finished_short_circuit"
FLOOR, BEFORE, AFTER = "noop", "mooncake", "short-circuit"
# The connector's config, and the patches of its tree.
VARIANTS = {
    FLOOR: ("noop", []),
    BEFORE: ("mooncake_both", [LAYOUT]),
    AFTER: ("mooncake_both", [LAYOUT, FIX]),
}


class Case(NamedTuple):
    """A condition under which all variants are measured."""

    name: str
    batch: int
    busy: bool
    # A share of --steps: with a busy thread a step takes a hundred times as long.
    share: float = 1.0


QUIET = [Case("nothing pending", batch, False) for batch in (1, 8, 32)]
BUSY = [Case("busy thread", batch, True, 0.1) for batch in (1, 8, 32)]
# Last, for they are held until the process ends.
HELD = [Case(f"{HELD_SENDS} sends held", 8, False)]

# us by case and variant: (rounds, 2, steps), get_finished and the whole step.
Samples = dict[tuple[Case, str], Floats]


class Quantile(msgspec.Struct):
    """A quantile of a time in us, with its 95 % interval."""

    us: float
    ci95_us: tuple[float, float]

    def __str__(self) -> str:
        digits = 2 if self.us < 10 else 1
        low, high = (number(us, digits) for us in self.ci95_us)
        return f"{number(self.us, digits)} [{low}, {high}]"


def quantile(times: Floats, q: float) -> Quantile:
    """A quantile of `times`, (rounds, steps); rounds are resampled whole."""
    rng = np.random.default_rng(SEED)
    rounds = len(times)
    draws = [
        np.quantile(times[rng.integers(rounds, size=rounds)], q)
        for _ in range(BOOTSTRAPS)
    ]
    low, high = np.quantile(draws, (0.025, 0.975))
    return Quantile(float(np.quantile(times, q)), (float(low), float(high)))


class Bench:
    """A process a variant, side by side; `samples` gets what they measure."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.engines = {
            name: stack.enter_context(
                EngineProcess(
                    folder / name, "costs.get_finished.worker", patches, connector
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


def measure(rounds: int, steps: int) -> tuple[Samples, dict[str, str]]:
    """All cases, and the hashes of the patches. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(Path(folder), stack)
        bench.measure(QUIET, rounds, steps)
        bench.measure(BUSY, rounds, steps)
        for name in (BEFORE, AFTER):
            if bench.engines[name].ask("hold_sends", HELD_SENDS) != HELD_SENDS:
                raise RuntimeError(f"{name} does not hold {HELD_SENDS} sends")
        bench.measure(HELD, rounds, steps)
        return bench.samples, bench.engines[AFTER].patch_hashes


class Row(msgspec.Struct):
    """One variant in one case: quantiles of its steps by name, p50 and p99."""

    case: str
    running_requests: int
    variant: str
    rounds: int
    steps: int
    get_finished_us: dict[str, Quantile]
    step_us: dict[str, Quantile]


def rows(samples: Samples) -> list[Row]:
    return [
        Row(
            case.name,
            case.batch,
            variant,
            len(times),
            times[:, 0].size,
            *(
                {name: quantile(times[:, part], q) for name, q in QUANTILES.items()}
                for part in (0, 1)
            ),
        )
        for (case, variant), times in samples.items()
    ]


def report(found: list[Row]) -> str:
    """A Markdown table of all cases, and one against the aims."""
    head = ["case", "running", "connector", "steps"]
    head += ["get_finished p50 us", "p99", "step p50 us", "p99"]
    body = [
        [row.case, str(row.running_requests), row.variant, f"{row.steps:,}"]
        + [str(q) for q in (*row.get_finished_us.values(), *row.step_us.values())]
        for row in found
    ]
    aims = [
        [
            row.case,
            str(row.running_requests),
            f"{name} <= {aim_us:g} us",
            str(row.get_finished_us[name]),
            verdict(row.get_finished_us[name], aim_us),
        ]
        for row in found
        if row.variant == AFTER and row.case == QUIET[0].name
        for name, aim_us in AIM_US.items()
    ]
    aims_head = ["short-circuit", "running", "aim", "get_finished us", ""]
    return f"{table(head, body)}\n\n{table(aims_head, aims)}"


def verdict(found: Quantile, aim_us: float) -> str:
    """Whether a quantile is at most `aim_us`, as far as its interval tells."""
    low_us, high_us = found.ci95_us
    if high_us <= aim_us:
        return "met"
    return "missed" if low_us > aim_us else "undecided"


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.get_finished.step_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200, help="a round and case")
    parser.add_argument("--out", type=Path, default=Path("runs/step-cost.json"))
    arguments = parser.parse_args()
    if arguments.rounds < MIN_ROUNDS or arguments.steps < MIN_STEPS:
        parser.error(f"at least {MIN_ROUNDS} rounds and {MIN_STEPS} steps")

    exit_on_signals()
    try:
        samples, patch_hashes = measure(arguments.rounds, arguments.steps)
    except RuntimeError as error:
        sys.exit(str(error))
    found = rows(samples)
    document = provenance.collect(patch_hashes)
    document["command_line"] = " ".join(
        ["python -m costs.get_finished.step_cost", *sys.argv[1:]]
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document["results"] = found
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=1)
    arguments.out.write_bytes(encoded + b"\n")
    print(report(found))


if __name__ == "__main__":
    main()
