# SPDX-License-Identifier: Apache-2.0
"""What the hooks' cost says of samples whose truth is known, and what it times."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.hooks import (
    AGAIN,
    BASE,
    OFF,
    ON,
    Samples,
    cost,
    report,
)

ROUNDS, STEPS = 10, 100


def steps(us: float, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(us, 0.5, (ROUNDS, STEPS))


def samples(again_us: float = 1, off_us: float = 1, engine_us: float = 2) -> Samples:
    variants = {BASE: 300, AGAIN: 300 + again_us, OFF: 300 + off_us, ON: 310}
    modes = {"no layers": 295, "floor": 301, "off": 300, "engine": 300 + engine_us}
    modes |= {"both": 301 + engine_us, "calls": 302.5 + engine_us}
    hooks = ("record", "pause", "call", "timed call", "counted call")
    return Samples(
        {name: steps(us, seed) for seed, (name, us) in enumerate(variants.items())},
        {name: steps(us, seed) for seed, (name, us) in enumerate(modes.items())},
        {name: steps(us + 100, seed) for seed, (name, us) in enumerate(modes.items())},
        {name: np.ones(5) for name in hooks},
        {},
    )


def judged(found: Samples) -> list[str]:
    """Of the engine's hooks, the worker's, what has no aim, and all when off."""
    rows = report(found)[1].splitlines()[2:]
    return [row.split("|")[3].strip() for row in rows]


def test_a_cost_is_what_the_quiet_quarter_of_the_steps_takes_more():
    disturbed = steps(305, 2)
    disturbed[:, ::2] *= 20
    assert cost(disturbed, steps(300)).value == pytest.approx(5.3, abs=0.3)


@pytest.mark.parametrize(("engine_us", "word"), [(9, "met"), (10.0, "undecided")])
def test_recording_is_judged_by_its_aim(engine_us, word):
    assert judged(samples(engine_us=engine_us))[0] == word
    assert judged(samples(engine_us=14))[0] == "missed"


@pytest.mark.parametrize(
    ("again_us", "off_us", "word"),
    [(3, 1, "met"), (-3, 1, "met"), (3, -2, "met"), (1, 8, "missed")],
)
def test_off_may_cost_what_two_unpatched_processes_differ_by(again_us, off_us, word):
    assert judged(samples(again_us, off_us))[-1] == word


def test_what_calls_and_layers_cost_is_told():
    found = "\n\n".join(report(samples()))
    (row,) = (line for line in found.splitlines() if "calls, on" in line)
    for column in (2, 4):
        assert float(row.split("|")[column].split()[0]) == pytest.approx(1.5, abs=0.2)
    longer = found.split("make a step longer by ")[1].split()[0]
    assert float(longer) == pytest.approx(5, abs=0.2)


def test_off_is_undecided_where_the_noise_would_hide_anything():
    assert judged(samples(again_us=15, off_us=1))[-1] == "undecided"
