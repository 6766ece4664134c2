# SPDX-License-Identifier: Apache-2.0
"""What the hooks' samples come to, as Markdown, and whether they cost what they may."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.stats.aims import Aim, Judgement, judge
from lab.stats.interval import Interval
from lab.stats.markdown import number, table
from lab.stats.rounds import added

Floats = NDArray[np.float64]

BASE, AGAIN, OFF, ON = "unpatched", "unpatched again", "patched, off", "patched, on"
VARIANTS = (BASE, AGAIN, OFF, ON)
# The most that recording is meant to add to a step.
AIMS = {
    "engine": Aim(what="engine, on", at_most=3.0, unit="us"),
    "worker": Aim(what="worker, on", at_most=2.0, unit="us"),
}
# With more noise between two unpatched processes "as unpatched" would say nothing.
MAX_NOISE_SHARE = 0.02


class Samples(NamedTuple):
    """Step times in us by variant and by mode, (rounds, steps); hook times (loops,)."""

    variants: dict[str, Floats]
    modes: dict[str, Floats]
    hooks: dict[str, Floats]


def cost(times_us: Floats, base_us: Floats) -> Interval:
    """How much longer steps of `times_us` are than `base_us`; both (rounds, steps)."""
    return Interval.of(added(times_us, base_us))


def judge_off(off: Interval, floor: Interval, base_us: float) -> tuple[Judgement, Aim]:
    """Off is as good as unpatched if it costs no more than two unpatched runs differ.

    `floor` is the cost of the second unpatched run. Undecided where the two differ by
    more than MAX_NOISE_SHARE of a step.
    """
    # A hook cannot make a step faster, so looking faster is noise as well.
    noise_us = max(abs(floor.ci95[0]), abs(floor.ci95[1]), -off.ci95[0])
    aim = Aim(what="both, off", at_most=noise_us, unit="us, the noise floor")
    found = judge(off, aim)
    if found == "met" and noise_us > MAX_NOISE_SHARE * base_us:
        found = "undecided"
    return found, aim


def variants_table(times_us: dict[str, Floats], costs: dict[str, Interval]) -> str:
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


def hooks_table(samples: Samples, costs: dict[str, Interval]) -> str:
    modes, hooks = samples.modes, samples.hooks
    split = {
        "engine": cost(modes["engine"], modes["off"]),
        "worker": cost(modes["both"], modes["engine"]),
    }
    rows = [
        [
            AIMS[name].what,
            f"{found:+.1f}",
            number(float(np.median(hooks[name])), 2),
            number(float(np.median(hooks[f"{name} record"])), 2),
            AIMS[name].bound,
            judge(found, AIMS[name]),
        ]
        for name, found in split.items()
    ]
    rows.append(
        [
            "the connector's calls, on",
            f"{cost(modes['calls'], modes['both']):+.1f}",
            *("", "", "", ""),
        ]
    )
    rows.append(
        [
            "request records, on",
            f"{cost(modes['requests'], modes['calls']):+.1f}",
            *("", "", "", ""),
        ]
    )
    base_us = float(np.median(samples.variants[BASE]))
    off, aim = judge_off(costs[OFF], costs[AGAIN], base_us)
    rows.append([aim.what, f"{costs[OFF]:+.1f}", "", "", aim.bound, off])
    head = ["hooks", "in a step, us", "tight loop, us", "to write, us", "our aim", ""]
    return table(head, rows)


def report(samples: Samples) -> str:
    """Two Markdown tables: the variants, and the hooks against what they may cost."""
    times_us = samples.variants
    costs = {name: cost(times_us[name], times_us[BASE]) for name in VARIANTS[1:]}
    rounds, steps = times_us[BASE].shape
    call_us, timed_us = (
        float(np.median(samples.hooks[name])) for name in ("call", "timed call")
    )
    layers = cost(samples.modes["off"], samples.modes["no layers"])
    calls = (
        f"A call of a method that does nothing takes {call_us:.2f} us, and "
        f"{timed_us:.2f} us when it is timed. The no-op connector's calls per layer "
        f"make a step longer by {layers:.1f} us. Not timed, as they take no time."
    )
    note = (
        f"{rounds} rounds of {steps} steps each; intervals are 95 %. Writing a record "
        "is the background thread's work: it holds the GIL while it encodes, a few "
        "times a second."
    )
    return "\n\n".join(
        [variants_table(times_us, costs), hooks_table(samples, costs), calls, note]
    )
