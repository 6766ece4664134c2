# SPDX-License-Identifier: Apache-2.0
"""Benchmarks start by name, and say of samples of known truth what is true."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

import numpy as np
import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.hooks import AGAIN, BASE, OFF, ON, Samples, cost, report
from benchmarks.look import SHIPPED, repeat_life
from kvtax.cli import main as main_of_kvtax
from kvtax.look.demo import unpack
from kvtax.paths import REPOSITORY
from kvtax.records.files import read_lines
from kvtax.records.steps import EngineHeader, EngineStep
from studies.results import BadArguments, NotMeasured
from tests.proc.living import eventually


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda of: of.name)
def test_each_benchmark_describes_itself_and_is_documented(benchmark):
    module = importlib.import_module(benchmark.module)
    parser = argparse.ArgumentParser()
    module.configure(parser)
    assert module.__doc__ and callable(module.run)
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert f"python -m benchmarks {benchmark.name}" in text


def test_without_a_name_each_benchmark_has_a_line(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [b.name for b in BENCHMARKS]


@pytest.mark.parametrize(
    ("error", "code"),
    [(NotMeasured("two cores are needed"), 3), (BadArguments("x"), 2)],
)
def test_only_errors_with_an_exit_code_end_a_benchmark_with_it(
    monkeypatch, capsys, error, code
):
    def fail(_):
        raise error

    monkeypatch.setattr("benchmarks.look.run", fail)
    assert main(["look"]) == code
    assert capsys.readouterr().err == f"look: {error}\n"
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["look"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_look_at_repeated_records_counts_all_steps(tmp_path, capsys, ranks):
    source, folder = tmp_path / "demo" / SHIPPED, tmp_path / "repeated"
    unpack(tmp_path / "demo")
    once = repeat_life(source, tmp_path / "once", 1, 1)
    assert repeat_life(source, folder, 2 * once, ranks) == 2 * once
    steps = read_lines(folder / "engine_step.jsonl", EngineHeader, EngineStep).records
    assert len(steps) == 2 * once
    assert [s.step_id - steps[0].step_id for s in steps] == list(range(2 * once))
    assert main_of_kvtax(["look", str(folder)]) == 0
    assert f"{2 * once:,} steps" in capsys.readouterr().out


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


STRESSOR = (sys.executable, "-m", "benchmarks", "stressor", "--")
# The first thing that a sweep looks at.
SEEN_BY_A_SWEEP = """
import os
from kvtax.proc.supervise import descendants, supervisors
print(sorted(supervisors() & set(descendants(os.getppid()))))
"""


def test_a_sweep_beside_it_is_not_refused_and_its_exit_status_is_passed_on():
    """Options of the command are its own."""
    command = [*STRESSOR, sys.executable, "-c", SEEN_BY_A_SWEEP + "raise SystemExit(3)"]
    done = subprocess.run(
        [*command, "--seed", "x"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, "[]\n"), done.stderr


def test_a_stressor_without_a_command_is_refused(capsys):
    assert main(["stressor", "--"]) == 2
    assert "give a command after --" in capsys.readouterr().err


@pytest.mark.slow
def test_the_neighbour_takes_cpu_and_goes_with_a_killed_parent():
    parent = psutil.Popen([*STRESSOR, "sleep", "600"], cwd=REPOSITORY)
    try:
        neighbour, command = started_by(parent)
        eventually(lambda: sum(neighbour.cpu_times()[:2]) >= 0.2)
    finally:
        parent.kill()
        parent.wait()
    command.kill()
    neighbour.wait(timeout=120)


def started_by(parent: psutil.Popen) -> list[psutil.Process]:
    """The neighbour and the command."""
    found: list[psutil.Process] = []

    def both_run() -> bool:
        # A command has its name a moment after its process is there.
        found[:] = sorted(parent.children(), key=lambda one: one.name() == "sleep")
        return len(found) == 2 and found[1].name() == "sleep"

    eventually(both_run)
    return found
