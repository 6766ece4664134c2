# SPDX-License-Identifier: Apache-2.0
"""What the step records cost an engine step: unpatched, patched and off, and on.

Each variant is a process of its own with an engine on the null model (no-op connector,
forward of zero length); the unpatched one runs twice, and the difference of the two
is the noise floor. One process at a time steps, in an order drawn anew each round, so
that drift of the machine hits all alike. A round counts with its lower quartile: what
disturbs a step only ever adds to it. A cost is the median over the rounds of the
difference within a round, with a percentile bootstrap over the rounds.

The split is measured in the process that records, where engine and worker hooks are
switched on and off every few steps: the same process, so without an offset between
processes. The same hooks in a tight loop show what they cost with warm caches.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.serving.engine_process import EngineProcess
from lab.serving.supervise import exit_on_signals
from lab.stats.markdown import number, table

Floats = NDArray[np.float64]

SEED = 20_240_731
BOOTSTRAPS = 2_000
HOOK_LOOPS = 50
MIN_ROUNDS, MIN_STEPS = 8, 20
# The most that recording is meant to cost a step.
AIM_US = {"engine": 3.0, "worker": 2.0}
# With more noise between two unpatched processes "as unpatched" would say nothing.
MAX_NOISE_SHARE = 0.02

PATCHES = ["step_timing_v1", "step_timing_v2"]
BASE, AGAIN, OFF, ON = "unpatched", "unpatched again", "patched, off", "patched, on"
VARIANTS = (BASE, AGAIN, OFF, ON)


class Cost(NamedTuple):
    """A difference of step times in us, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


class Samples(NamedTuple):
    """Step times in us by variant and by mode, (rounds, steps); hook times (loops,)."""

    variants: dict[str, Floats]
    modes: dict[str, Floats]
    hooks: dict[str, Floats]


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
    return Samples(
        {name: np.array(times_us) for name, times_us in variants.items()},
        {name: np.array(times_us) for name, times_us in modes.items()},
        hooks,
    )


def cost(times: Floats, base: Floats) -> Cost:
    """What `times` took more than `base`, both (rounds, steps)."""
    paired = np.quantile(times, 0.25, axis=1) - np.quantile(base, 0.25, axis=1)
    rng = np.random.default_rng(SEED)
    draws = np.median(rng.choice(paired, (BOOTSTRAPS, len(paired))), axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return Cost(float(np.median(paired)), float(low), float(high))


def verdict(found: Cost, aim_us: float) -> str:
    """Whether a cost is at most `aim_us`, as far as its interval tells."""
    if found.high <= aim_us:
        return "met"
    return "missed" if found.low > aim_us else "undecided"


def off_verdict(off: Cost, floor: Cost, base_us: float) -> str:
    """Off is as good as unpatched if it costs no more than two such runs differ."""
    # A hook cannot make a step faster, so looking faster is noise as well.
    noise_us = max(abs(floor.low), abs(floor.high), -off.low)
    if off.low > noise_us:
        word = "missed"
    else:
        word = "met" if noise_us <= MAX_NOISE_SHARE * base_us else "undecided"
    return f"{word} (noise floor {noise_us:.1f} us)"


def variants_table(times_us: dict[str, Floats], costs: dict[str, Cost]) -> str:
    base_us = float(np.median(times_us[BASE]))
    rows = []
    for name, times in times_us.items():
        quantiles = [number(float(q)) for q in np.quantile(times, (0.5, 0.9, 0.99))]
        more = costs.get(name)
        share = "" if more is None else f"{100 * more.value / base_us:+.1f}"
        rows.append([name, *quantiles, "" if more is None else str(more), share])
    head = ["variant", "step p50 us", "p90", "p99", "more than unpatched, us", "%"]
    return table(head, rows)


def hooks_table(samples: Samples, costs: dict[str, Cost]) -> str:
    modes, hooks = samples.modes, samples.hooks
    split = {
        "engine": cost(modes["engine"], modes["off"]),
        "worker": cost(modes["both"], modes["engine"]),
    }
    rows = [
        [
            f"{name}, on",
            str(found),
            number(float(np.median(hooks[name])), 2),
            number(float(np.median(hooks[f"{name} record"])), 2),
            f"<= {AIM_US[name]:g} us",
            verdict(found, AIM_US[name]),
        ]
        for name, found in split.items()
    ]
    base_us = float(np.median(samples.variants[BASE]))
    off = off_verdict(costs[OFF], costs[AGAIN], base_us)
    rows.append(["both, off", str(costs[OFF]), "", "", "as unpatched", off])
    head = ["hooks", "in a step, us", "tight loop, us", "to write, us", "aim", ""]
    return table(head, rows)


def report(samples: Samples) -> str:
    """Two Markdown tables: the variants, and the hooks against what they may cost."""
    times_us = samples.variants
    costs = {name: cost(times_us[name], times_us[BASE]) for name in VARIANTS[1:]}
    rounds, steps = times_us[BASE].shape
    note = (
        f"{rounds} rounds of {steps} steps each; intervals are 95 %. Writing a record "
        "is the background thread's work: it holds the GIL while it encodes, a few "
        "times a second."
    )
    return "\n\n".join(
        [variants_table(times_us, costs), hooks_table(samples, costs), note]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.hooks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=500, help="a round")
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
