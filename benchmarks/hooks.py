# SPDX-License-Identifier: Apache-2.0
"""Cost of the step records per engine step: unpatched, patched and off, and on.

Each variant is a process of its own with an engine on the null model (no-op connector,
forward of zero length). The unpatched one runs twice, and the difference of the two
is the noise floor. One process at a time steps, in an order drawn anew each round, so
that drift of the machine hits all alike. A round counts with its lower quartile: what
disturbs a step only ever adds to it. A cost is the median over the rounds of the
difference within a round, with a percentile bootstrap over the rounds.

The split is measured in the process that records: the connector's calls per layer, the
records of engine (with its requests) and worker, and the timing of the connector's
calls are switched on and off there every few steps, so no two processes are compared.
The same is done with steps in each of which a request starts and another one ends.
So is the floor: what reads the clock before and after both of the scheduler's calls and
appends one tuple.
Writing and single calls are timed in a tight loop.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtax.report.markdown import number, table
from kvtax.stats import Estimate
from kvtax.stats.resampling import added
from kvtax.verdict.aims import Aim, Judgement, judge
from studies.results import (
    Variant,
    at_least,
    configure_rounds,
    engines,
    publish,
    turns,
)

HOOK_LOOPS = 50
MIN_ROUNDS, MIN_STEPS = 8, 20
PATCHES = ["step_timing_v2"]
# What an operator gets, not the clocks of every step that a sweep takes.
DEFAULTS = {"KVTAX_STEP_RECORDS_CPU_EVERY": "16"}


def measure(rounds: int, steps: int, batch: int) -> Samples:
    """Run all variants side by side. Raises ServerError if one of them fails."""
    variants: dict[str, list[Floats]] = {name: [] for name in VARIANTS}
    splits: dict[str, dict[str, list[Floats]]] = {"time_modes": {}, "time_starts": {}}
    worker = "benchmarks.hooks_worker"
    with engines(worker, VARIANTS, records_env=DEFAULTS) as processes:
        records = processes[ON]
        for _, name in turns(VARIANTS, rounds):
            variants[name].append(processes[name].ask("time_steps", batch, steps))
        for number_of_round in range(rounds):
            for how, modes in splits.items():
                split = records.ask(how, batch, steps, number_of_round)
                for mode, times_us in split.items():
                    modes.setdefault(mode, []).append(times_us)
        hooks = records.ask("time_writing", HOOK_LOOPS)
        hooks |= records.ask("time_calls", HOOK_LOOPS)
        hashes = records.patch_hashes
    variants_us, modes_us, starts_us = (
        {name: np.array(times_us) for name, times_us in part.items()}
        for part in (variants, *splits.values())
    )
    return Samples(variants_us, modes_us, starts_us, hooks, hashes)


Floats = NDArray[np.float64]

BASE, AGAIN, OFF, ON = "unpatched", "unpatched again", "patched, off", "patched, on"
VARIANTS = {
    BASE: Variant([]),
    AGAIN: Variant([]),
    OFF: Variant(PATCHES),
    ON: Variant(PATCHES, recording=True),
}
# The most that recording is meant to add to a step.
AIMS = {
    "engine": Aim(what="engine, on", at_most=10.0, unit="us"),
    "worker": Aim(what="worker, on", at_most=2.0, unit="us"),
}
# With more noise between two unpatched processes "as unpatched" would say nothing.
MAX_NOISE_SHARE = 0.02


class Samples(NamedTuple):
    """Step times in us by variant and by mode, (rounds, steps); hook times (loops,).

    Those of `starts` are of steps in which a request starts and one ends.
    """

    variants: dict[str, Floats]
    modes: dict[str, Floats]
    starts: dict[str, Floats]
    hooks: dict[str, Floats]
    patch_hashes: dict[str, str]


def cost(times_us: Floats, base_us: Floats) -> Estimate:
    """Compute how much longer steps take than `base_us`; both (rounds, steps)."""
    return Estimate.of(added(times_us, base_us))


def judge_off(off: Estimate, floor: Estimate, base_us: float) -> tuple[Judgement, Aim]:
    """Off is as good as unpatched if it costs no more than two unpatched runs differ.

    `floor` is the cost of the second unpatched run. Undecided where the two differ by
    more than MAX_NOISE_SHARE of a step.
    """
    # A hook cannot make a step faster, so looking faster is noise as well.
    noise_us = max(abs(floor.low), abs(floor.high), -off.low)
    aim = Aim(what="both, off", at_most=noise_us, unit="us, the noise floor")
    found = judge(off, aim)
    if found == "met" and noise_us > MAX_NOISE_SHARE * base_us:
        found = "undecided"
    return found, aim


def variants_table(times_us: dict[str, Floats], costs: dict[str, Estimate]) -> str:
    base_us = float(np.median(times_us[BASE]))
    rows = []
    for name, times in times_us.items():
        cells = [number(float(q)) for q in np.quantile(times, (0.5, 0.9, 0.99))]
        if (more := costs.get(name)) is None:
            cells += ["", ""]
        else:
            cells += [f"{more:+.1f}", f"{100 * more.value / base_us:+.1f}"]
        rows.append([name, *cells])
    head = ["variant", "step p50 us", "p90", "p99", "more than unpatched, us", "%"]
    return table(head, rows)


# A part of the recording: the mode that has it, and the one without.
PARTS = {
    "engine": ("engine", "off"),
    "worker": ("both", "engine"),
    "the connector's calls, on": ("calls", "both"),
    "all of it, on": ("calls", "off"),
    "the floor: four clocks, one append": ("floor", "off"),
}


def parts_table(samples: Samples, costs: dict[str, Estimate]) -> str:
    rows = []
    for name, (with_it, without) in PARTS.items():
        more, at_start = (
            cost(modes[with_it], modes[without])
            for modes in (samples.modes, samples.starts)
        )
        row = [f"{more:+.1f}", "", f"{at_start:+.1f}", "", ""]
        if aim := AIMS.get(name):
            row = [f"{more:+.1f}", judge(more, aim)]
            row += [f"{at_start:+.1f}", judge(at_start, aim), aim.bound]
        rows.append([aim.what if aim else name, *row])
    base_us = float(np.median(samples.variants[BASE]))
    off, aim = judge_off(costs[OFF], costs[AGAIN], base_us)
    rows.append([aim.what, f"{costs[OFF]:+.1f}", off, "", "", aim.bound])
    head = ["part", "in a decode step, us", "", "where a request starts, us", ""]
    return table([*head, "our aim"], rows)


def report(samples: Samples) -> list[str]:
    """Two Markdown tables: the variants, and the parts against what they may cost."""
    times_us = samples.variants
    costs = {name: cost(times_us[name], times_us[BASE]) for name in (AGAIN, OFF, ON)}
    rounds, steps = times_us[BASE].shape
    median = {name: float(np.median(us)) for name, us in samples.hooks.items()}
    layers = cost(samples.modes["off"], samples.modes["no layers"])
    calls = (
        f"A call of a method that does nothing takes {median['call']:.2f} us, "
        f"{median['timed call']:.2f} us when it is timed, and "
        f"{median['counted call']:.2f} us when it is counted. The no-op connector's "
        f"calls per layer make a step longer by {layers:.1f} us. They are not timed, "
        "as they take no time."
    )
    note = (
        f"{rounds} rounds of {steps} steps each; intervals are 95 %. A background "
        f"thread writes a record in {median['record']:.2f} us. While it does, the "
        "longest pause of another thread is "
        f"{np.median(samples.hooks['pause']):,.0f} us (median of {HOOK_LOOPS} times "
        "1,000 records)."
    )
    return [variants_table(times_us, costs), parts_table(samples, costs), calls, note]


def raw(samples: Samples) -> dict[str, dict[str, list[float]]]:
    """Lower quartile of each round by variant and by mode, and the loops' times."""
    rounds = {
        kind: {name: np.quantile(us, 0.25, axis=1) for name, us in times.items()}
        for kind, times in samples._asdict().items()
        if kind in ("variants", "modes", "starts")
    }
    return {
        f"{kind}_us": {name: np.round(us, 3).tolist() for name, us in times.items()}
        for kind, times in {**rounds, "hooks": samples.hooks}.items()
    }


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks hooks`."""
    configure_rounds(parser, "hooks", 30, MIN_ROUNDS)
    parser.add_argument(
        "--steps", type=at_least(MIN_STEPS), default=500, help="per round"
    )
    parser.add_argument("--batch", type=at_least(1), default=8, help="running requests")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    rounds, steps, batch = arguments.rounds, arguments.steps, arguments.batch
    samples = measure(rounds, steps, batch)
    parts = report(samples)
    return publish("hooks", arguments.out, parts, raw(samples), samples.patch_hashes)
