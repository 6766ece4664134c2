# SPDX-License-Identifier: Apache-2.0
"""Benchmarks start by name, and say of samples of known truth what is true."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys

import numpy as np
import psutil
import pytest

from benchmarks.command import BENCHMARKS
from benchmarks.hooks import AGAIN, BASE, OFF, ON, Samples, cost, report
from benchmarks.proxy import DIRECT, added, added_table, rates_table
from benchmarks.proxy_targets import BODIES
from benchmarks.results import NotMeasured
from kvtax.cli import Exit, main
from kvtax.paths import REPOSITORY
from kvtax.stats import resampling
from tests.proc.living import eventually


@pytest.fixture
def bench(capsys, signals):
    """Return the output of `kvtax bench` with these arguments."""

    def of(*arguments: str) -> str:
        assert main(["bench", *arguments]) == Exit.GOOD
        return capsys.readouterr().out

    return of


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda of: of.name)
def test_each_benchmark_describes_itself_and_is_documented(benchmark):
    module = importlib.import_module(benchmark.module)
    parser = argparse.ArgumentParser()
    module.configure(parser)
    assert module.__doc__ and callable(module.run)
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert f"kvtax bench {benchmark.name}" in text


@pytest.mark.slow
def test_the_list_has_a_line_per_benchmark(bench):
    assert [line.split()[0] for line in bench().splitlines()] == [
        benchmark.name for benchmark in BENCHMARKS
    ]


@pytest.mark.slow
def test_only_errors_with_an_exit_code_end_a_benchmark_with_one(monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr("benchmarks.look.run", fail)
    error = NotMeasured("two cores are needed")
    assert main(["bench", "look"]) == Exit.NOT_MEASURED
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["bench", "look"])


@pytest.mark.slow
def test_a_small_fleet_is_looked_at_twice(bench):
    text = bench("look", "--steps", "9000", "--servers", "3")
    for look in ("first, of JSON", "second, of what the first kept"):
        assert f"| {look} |" in text
    assert "The page has 0." in text


@pytest.mark.slow
def test_what_three_hosts_count_is_what_one_would(bench):
    text = bench("look", "--hosts", "3", "--steps", "9000", "--servers", "3")
    assert "Counts of merged and whole are equal." in text
    _, _, table = text.partition("% off |")
    off = [float(row) for row in re.findall(r"\| ([\d.]+)% \|", table)]
    assert len(off) > 2 and max(off) <= 1.0


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


ROUNDS = 12


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch):
    """No figure here is near the end of an interval."""
    monkeypatch.setattr(resampling, "ROUND_REPLICATES", 100)


def answers() -> dict:
    """Times in ms of a machine that gets slower; the proxy adds 1.5 ms to all."""
    rng = np.random.default_rng(1)
    found = {}
    for body in BODIES:
        direct = [list(rng.normal(1 + r / 10, 0.05, 40)) for r in range(ROUNDS)]
        found[DIRECT, body] = direct
        found["proxy", body] = [[ms + 1.5 for ms in of_round] for of_round in direct]
    return found


@pytest.mark.parametrize("percent", [50, 99])
def test_what_is_added_is_the_difference_whatever_the_machine_does(percent):
    found = added(answers(), "proxy", "small", percent)
    assert found.value == pytest.approx(1.5)
    assert found.ci95 == pytest.approx((1.5, 1.5))


def test_each_target_has_a_row_for_each_body():
    rows = added_table(answers(), ["proxy"]).splitlines()[2:]
    assert len(rows) == len(BODIES)
    assert all("+1.50 [+1.50, +1.50]" in row for row in rows)


def test_rates_are_medians_of_the_rounds_with_their_range():
    rounds = [[1_000.0, 9.0], [3_000.0, 7.0], [2_000.0, 8.0]]
    rates = {("proxy", body): rounds for body in BODIES}
    assert "2,000 [1,000, 3,000]" in rates_table(rates, ["proxy"], 0)
    assert "8 [7, 9]" in rates_table(rates, ["proxy"], 1)


STRESSOR = (sys.executable, "-m", "kvtax", "bench", "stressor", "--")
# The first thing that a sweep looks at.
SEEN_BY_A_SWEEP = """
import os
from kvtax.proc.machine_lock import supervisors
from kvtax.proc.supervise import descendants
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
    assert main(["bench", "stressor", "--"]) == 2
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
