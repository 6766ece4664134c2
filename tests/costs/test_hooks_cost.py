# SPDX-License-Identifier: Apache-2.0
"""What the hooks' cost says of samples whose truth is known, and what it times."""

from __future__ import annotations

import ast
from collections import Counter

import numpy as np
import pytest

from costs.hooks.__main__ import PATCHES
from costs.hooks.patch_hooks import (
    CONNECTOR_MIXIN,
    CORE,
    SCHEDULER,
    STEP_PATCHES,
    WORKER,
    engine_hooks,
    step_blocks,
    worker_hooks,
)
from costs.hooks.report import AGAIN, BASE, OFF, ON, Samples, cost, report
from lab.serving.installation import installation
from lab.serving.tree import build_tree

ROUNDS, STEPS = 10, 100


def steps(us: float, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(us, 0.5, (ROUNDS, STEPS))


def samples(again_us: float = 1, off_us: float = 1, engine_us: float = 2) -> Samples:
    variants = {BASE: 300, AGAIN: 300 + again_us, OFF: 300 + off_us, ON: 310}
    modes = {"no layers": 295, "off": 300, "engine": 300 + engine_us}
    modes |= {"both": 301 + engine_us, "calls": 302.5 + engine_us}
    modes |= {"requests": 303 + engine_us}
    hooks = ("engine", "engine record", "worker", "worker record", "call", "timed call")
    return Samples(
        {name: steps(us, seed) for seed, (name, us) in enumerate(variants.items())},
        {name: steps(us, seed) for seed, (name, us) in enumerate(modes.items())},
        {name: np.ones(5) for name in hooks},
    )


def judged(found: Samples) -> list[str]:
    """Of the engine's hooks, the worker's, the connector's calls, and all when off."""
    rows = report(found).split("\n\n")[1].splitlines()[2:]
    return [row.split("|")[-2].strip() for row in rows]


def test_a_cost_is_what_the_quiet_quarter_of_the_steps_takes_more():
    disturbed = steps(305, 2)
    disturbed[:, ::2] *= 20
    assert cost(disturbed, steps(300)).value == pytest.approx(5.3, abs=0.3)


@pytest.mark.parametrize(("engine_us", "word"), [(2, "met"), (3.0, "undecided")])
def test_recording_is_judged_by_its_aim(engine_us, word):
    assert judged(samples(engine_us=engine_us))[0] == word
    assert judged(samples(engine_us=9))[0] == "missed"


@pytest.mark.parametrize(
    ("again_us", "off_us", "word"),
    [(3, 1, "met"), (-3, 1, "met"), (3, -2, "met"), (1, 8, "missed")],
)
def test_off_may_cost_what_two_unpatched_processes_differ_by(again_us, off_us, word):
    assert judged(samples(again_us, off_us))[-1] == word


def test_what_calls_and_layers_cost_is_told():
    found = report(samples())
    (row,) = (line for line in found.splitlines() if "calls, on" in line)
    assert float(row.split("|")[2].split()[0]) == pytest.approx(1.5, abs=0.2)
    longer = found.split("make a step longer by ")[1].split()[0]
    assert float(longer) == pytest.approx(5, abs=0.2)


def test_off_is_undecided_where_the_noise_would_hide_anything():
    assert judged(samples(again_us=15, off_us=1))[-1] == "undecided"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A patched vLLM's folder."""
    tree = tmp_path_factory.mktemp("hooks") / "tree"
    build_tree(tree, installation().package("vllm"), PATCHES, {})
    return tree / "vllm"


class Recorder:
    """Takes any call, and counts what is called or set on it."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __getattr__(self, name):
        if name.endswith("_ns"):
            return 0
        return lambda *_: self.seen.update([name])

    def __setattr__(self, name, value) -> None:
        if name == "seen":
            object.__setattr__(self, name, value)
        else:
            self.seen.update([name])


@pytest.mark.slow
def test_the_tight_loop_runs_every_line_that_the_patches_put_into_a_step(package):
    recorder = Recorder()
    names = {"ENGINE_STEPS": recorder, "now_ns": lambda: 0}
    engine_hooks(package, names)(None, None)
    # Both patches end a step, as each can be applied alone.
    assert recorder.seen == {
        "schedule_began_ns": 1,
        "begin_schedule": 1,
        "began_ns": 1,
        "build_meta_ns": 1,
        "end_schedule": 1,
        "note_block_pool": 1,
        "begin_update": 1,
        "end_update": 1,
        "end_step": 2,
    }
    recorder = Recorder()
    names = {"WORKER_STEPS": recorder, "now_ns": lambda: 0}
    worker_hooks(package, names)(recorder, None)
    assert recorder.seen == {
        "begin_step": 1,
        "began_ns": 4,
        "bind_ns": 1,
        "start_load_kv_ns": 1,
        "wait_for_save_ns": 1,
        "get_finished_ns": 1,
        "end_execute_model": 1,
    }


@pytest.mark.slow
def test_imports_and_the_loop_of_other_engines_are_left_out(package):
    for file in (SCHEDULER, CORE, WORKER, CONNECTOR_MIXIN):
        blocks = step_blocks(package, file)
        assert blocks
        for block in blocks:
            assert isinstance(ast.parse(block).body[0], ast.If)
    assert len(step_blocks(package, CORE)) == len(STEP_PATCHES)
