# SPDX-License-Identifier: Apache-2.0
"""CPU time that the recorder adds to an engine step.

One process has an engine on the null model (no-op connector, forward of zero length).
Every few steps its recorder gets another setting, in an order drawn anew each round:
off, each step recorded, and one step in eight. Steps are of two kinds: steps that only
decode, and steps in each of which a request starts and another ends. A cost is the
median over the rounds of the difference from off within a round, in CPU time of the
engine's thread, with a bootstrap over the rounds. Single calls of an empty method are
timed in a loop.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtax.engine.engine_process import EngineProcess
from kvtax.report.markdown import table
from kvtax.stats.distribution import SEED, Floats
from studies.results import at_least, configure_rounds, publish

KINDS = {
    "time_decode": "decodes only",
    "time_starts": "a request starts, another ends",
}
OFF = "off"
# By setting of KVTAX_STEP_RECORDS_EVERY the most that a step should take longer, in us.
GOALS_US = {"1": 12.0, "8": 4.0}
# Rounds for which a batch of one engine lasts.
ROUNDS_AT_ONCE = 60
REPLICATES = 2_000
LOOPS = 50
# The defaults of an operator, not the clocks of every step that a sweep takes.
ENV = {"KVTAX_STEP_RECORDS_CPU_EVERY": "16"}


class Cost(NamedTuple):
    """Added time of steps of a kind with a setting, in us, with its interval."""

    kind: str
    every: str
    us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, kind: str, every: str, added_us: Floats) -> Cost:
        """Compute the median of the rounds, with a bootstrap interval of 95 %."""
        draw = np.random.default_rng(SEED)
        picked = draw.integers(len(added_us), size=(REPLICATES, len(added_us)))
        low, high = np.quantile(np.median(added_us[picked], axis=1), (0.025, 0.975))
        return cls(kind, every, float(np.median(added_us)), float(low), float(high))

    @property
    def judgement(self) -> str:
        """Say whether the whole interval is within the goal, or outside."""
        goal_us = GOALS_US[self.every]
        if self.high_us <= goal_us:
            return "met"
        return "missed" if self.low_us > goal_us else "undecided"


Times = dict[str, dict[str, list[float]]]


def measure(rounds: int, batch: int) -> tuple[Times, dict[str, str]]:
    """Time steps by kind and setting, and calls. Raises ServerError."""
    settings = [OFF, *GOALS_US]
    times_us: Times = {kind: {name: [] for name in settings} for kind in KINDS}
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(
            Path(folder),
            "benchmarks.hooks_worker",
            ["step_timing_v2"],
            recording=True,
            records_env=ENV,
        ) as process,
    ):
        process.wait_ready()
        for begun in range(0, rounds, ROUNDS_AT_ONCE):
            count = min(ROUNDS_AT_ONCE, rounds - begun)
            for kind in KINDS:
                part = process.ask(kind, batch, count, settings)
                for name, values in part.items():
                    times_us[kind][name] += values
        calls = process.ask("time_calls", LOOPS)
        return times_us | {"time_calls": calls}, process.patch_hashes


def costs(times_us: Times) -> list[Cost]:
    """Compute the cost of each kind of step with each setting."""
    return [
        Cost.of(kind, every, np.subtract(times_us[kind][every], times_us[kind][OFF]))
        for kind in KINDS
        for every in GOALS_US
    ]


def report(times_us: Times) -> list[str]:
    """Return a Markdown table of costs, and a sentence on calls."""
    rows = [
        [
            KINDS[cost.kind],
            f"{np.median(times_us[cost.kind][OFF]):.0f}",
            cost.every,
            f"{cost.us:+.1f} [{cost.low_us:+.1f}, {cost.high_us:+.1f}]",
            f"{GOALS_US[cost.every]:g}",
            cost.judgement,
        ]
        for cost in costs(times_us)
    ]
    head = ["step", "off, CPU µs", "recorded: 1 in", "more, CPU µs", "our goal", ""]
    call = {name: float(np.median(us)) for name, us in times_us["time_calls"].items()}
    calls = (
        f"A call of an empty method takes {call['bare']:.3f} µs, "
        f"{call['timed']:.3f} µs when it is timed, and {call['counted']:.3f} µs when "
        f"it is counted. Its record says {call['reported']:.3f} µs."
    )
    rounds = f"{len(times_us['time_decode'][OFF])} rounds; intervals are 95 %."
    return [table(head, rows), calls, rounds]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks hooks`."""
    configure_rounds(parser, "hooks", 420, 20)
    parser.add_argument("--batch", type=at_least(1), default=8, help="running requests")


def run(arguments: argparse.Namespace) -> int:
    """Measure, publish the result and return the exit code."""
    times_us, hashes = measure(arguments.rounds, arguments.batch)
    rounded = {
        kind: {name: np.round(us, 3).tolist() for name, us in times.items()}
        for kind, times in times_us.items()
    }
    return publish("hooks", arguments.out, report(times_us), rounded, hashes)
