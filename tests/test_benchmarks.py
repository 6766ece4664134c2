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
from benchmarks.hooks import KINDS, OFF, Times, costs, measure, report
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


ROUNDS = 60


def times_of(added_us: dict[str, float], spread_us: float = 1.0) -> Times:
    """CPU times of steps on a machine that is slower in some rounds."""
    draw = np.random.default_rng(1)
    slow = draw.choice([300.0, 900.0], ROUNDS)
    by_setting = {OFF: 0.0, **added_us}
    times = {
        name: list(slow + more + draw.normal(0, spread_us, ROUNDS))
        for name, more in by_setting.items()
    }
    calls = {"bare": [0.05], "timed": [0.3], "counted": [0.1], "reported": [0.01]}
    return dict.fromkeys(KINDS, times) | {"time_calls": calls}


@pytest.mark.parametrize(
    ("us", "spread_us", "word"),
    [(9.0, 1.0, "met"), (15.0, 1.0, "missed"), (12.1, 30.0, "undecided")],
)
def test_a_cost_is_the_difference_within_a_round_and_judged_by_its_goal(
    us, spread_us, word
):
    added = costs(times_of({"1": us, "8": 1.0}, spread_us))
    assert [(cost.kind, cost.every) for cost in added] == [
        (kind, every) for kind in KINDS for every in ("1", "8")
    ]
    for cost in added[::2]:
        assert cost.low_us < us < cost.high_us
        assert cost.judgement == word


def test_a_report_has_each_kind_of_step_and_setting():
    table, calls, _ = report(times_of({"1": 9.0, "8": 1.0}))
    rows = [row.split("|") for row in table.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == [w for w in KINDS.values() for _ in "18"]
    assert [row[3].strip() for row in rows] == ["1", "8", "1", "8"]
    assert "0.300 µs when it is timed" in calls


@pytest.mark.slow
def test_a_real_engine_is_measured_with_each_setting():
    times_us, hashes = measure(rounds=2, batch=4)
    assert "step_timing_v2" in hashes
    for kind in KINDS:
        assert {len(values) for values in times_us[kind].values()} == {2}
        assert min(map(min, times_us[kind].values())) > 0
    calls = {name: np.median(us) for name, us in times_us["time_calls"].items()}
    assert calls["bare"] < calls["counted"] < calls["timed"]
    assert calls["reported"] < 0.5 * (calls["timed"] - calls["bare"])


STRESSOR = (sys.executable, "-m", "benchmarks", "stressor", "--")
# The first thing that a sweep looks at.
SEEN_BY_A_SWEEP = """
import os
from kvtax.proc.supervise import descendants, supervisors
print(sorted(supervisors() & set(descendants(os.getppid()))))
"""


@pytest.mark.slow
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
    children: list[psutil.Process] = []

    def both_run() -> bool:
        # A command has its name a moment after its process is there.
        children[:] = sorted(
            parent.children(), key=lambda child: child.name() == "sleep"
        )
        return len(children) == 2 and children[1].name() == "sleep"

    eventually(both_run)
    return children
