# SPDX-License-Identifier: Apache-2.0
"""A sample says what a thread was doing at the moment that it names."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from lab.records.stacks import SampledStacks, read_stacks
from lab.serving.py_spy_output import NotUnderstood, sampled
from tests.lab.living import content

pytestmark = pytest.mark.slow

# Computes and waits in turn, and says when it did which. A thread waits all the time.
PROGRAM = """
import json, sys, threading, time

def computes(until):
    while time.perf_counter() < until:
        pass

def waits_in_vain():
    threading.Event().wait()

threading.Thread(target=waits_in_vain, name="waiter", daemon=True).start()
folder, began, turns = sys.argv[1], time.perf_counter(), []
header = {"schema": "kvtax.engine_step/1", "pid": __import__("os").getpid()}
open(f"{folder}/engine_step.jsonl", "w").write(json.dumps(header) + "\\n")
while time.perf_counter() < began + 60:
    first = time.perf_counter_ns()
    computes(time.perf_counter() + 0.03)
    turns.append((first, time.perf_counter_ns()))
    with open(f"{folder}/turns.partial", "a") as out:
        out.write(json.dumps(turns[-1]) + "\\n")
    time.sleep(0.03)
"""


def sample(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lab.serving.py_spy", str(folder), *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, SampledStacks]:
    folder = tmp_path_factory.mktemp("records")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, str(program), str(folder)]) as process:
        try:
            content(folder / "engine_step.jsonl")
            done = sample(folder, "--seconds", "3")
        finally:
            process.kill()
    assert done.returncode == 0, done.stderr
    return folder, read_stacks(folder / f"stacks.{process.pid}.json")


def frames_of(found: SampledStacks, name: str) -> list[tuple[int, list[str]]]:
    """(t_ns, frames) of each sample of the thread `name`."""
    thread = [one.name for one in found.threads].index(name)
    return [
        (one.t_ns, [found.frames[at] for at in found.stacks[one.stack]])
        for one in found.samples
        if one.thread == thread
    ]


def test_what_was_done_at_the_moment_of_a_sample_is_what_it_shows(recorded):
    folder, found = recorded
    lines = (folder / "turns.partial").read_text().splitlines()
    turns = [json.loads(line) for line in lines]
    main = frames_of(found, "MainThread")
    assert len(main) > 100
    wrong = 0
    for t_ns, frames in main:
        computing = any(first <= t_ns < last for first, last in turns)
        shown = any(frame.startswith("computes ") for frame in frames)
        wrong += computing != shown
    assert wrong <= 0.02 * len(main)
    computed = sum(any(f.startswith("computes ") for f in of) for _, of in main)
    assert 0.3 < computed / len(main) < 0.7


def test_a_thread_that_only_waits_is_shown_where_it_waits(recorded):
    _, found = recorded
    waits = frames_of(found, "waiter")
    assert len(waits) > 100
    assert all(any(f.startswith("waits_in_vain ") for f in of) for _, of in waits)


def test_nothing_is_left_but_the_stacks(recorded):
    folder, found = recorded
    left = {path.name for path in folder.iterdir()}
    known = {"program.py", "engine_step.jsonl", "turns.partial"}
    assert left == known | {f"stacks.{found.pid}.json"}


def test_a_process_that_is_gone_is_named(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    header = {"schema": "kvtax.engine_step/1", "pid": ended.pid}
    (tmp_path / "engine_step.jsonl").write_text(json.dumps(header) + "\n")
    done = sample(tmp_path, "--seconds", "1")
    assert done.returncode == 1
    assert f"cannot sample process {ended.pid}" in done.stderr
    assert not list(tmp_path.glob("stacks*"))


@pytest.mark.parametrize(
    ("options", "what"), [((), "no engine_step"), (("--seconds", "0"), "above 0")]
)
def test_what_cannot_be_sampled_is_refused_with_what_to_do(tmp_path, options, what):
    done = sample(tmp_path, *options)
    assert done.returncode == 1
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def log_of(stops_ns: list[int], tid: int) -> str:
    lines = []
    for t_ns in stops_ns:
        at = f"2026-01-01T00:00:{t_ns // 10**9:02}.{t_ns % 10**9:09}Z"
        after = f"2026-01-01T00:00:{t_ns // 10**9:02}.{t_ns % 10**9 + 1000:09}Z"
        lines += [f"[{at} DEBUG remoteprocess::linux] attached to thread {tid}"]
        lines += [f"[{after} DEBUG remoteprocess::linux] detached from thread {tid}"]
    return "\n".join(lines)


def change(ts_us: int, phase: str, name: str) -> dict:
    args = {"filename": "", "line": 0}
    return {"ph": phase, "name": name, "ts": ts_us, "tid": 7, "pid": 1, "args": args}


@pytest.mark.parametrize("before", range(5))
def test_stops_before_the_first_sample_move_none(before):
    chance = random.Random(before)
    gaps = [chance.randrange(3_000_000, 20_000_000) for _ in range(40)]
    stops_ns = [sum(gaps[: index + 1]) for index in range(40)]
    of_samples = stops_ns[before:]
    began_ns = of_samples[0]
    events = [change(0, "B", "thread (9): MainThread"), change(0, "B", "a")]
    inside = "a"
    truth = ["a"]
    for stop_ns in of_samples[1:]:
        ts_us = (stop_ns - began_ns) // 1_000 + 20
        if chance.random() < 0.5:
            events.append(change(ts_us, "E", inside))
            inside = "b" if inside == "a" else "a"
            events.append(change(ts_us, "B", inside))
        truth.append(inside)
    found = sampled(json.dumps(events).encode(), log_of(stops_ns, 9))
    shown = [found.frames[found.stacks[one.stack][0]] for one in found.samples]
    assert shown == truth


@pytest.mark.parametrize(
    ("trace", "log", "what"),
    [
        (b"{", log_of([1], 9), "no JSON"),
        (b"[]", log_of([1], 9), "nothing was sampled"),
        (json.dumps([change(0, "B", "a")]).encode(), "", "nothing was sampled"),
    ],
)
def test_output_that_is_not_what_is_known_of_it_is_refused(trace, log, what):
    with pytest.raises(NotUnderstood, match=what):
        sampled(trace, log)


def test_changes_that_fit_no_stop_are_refused():
    events = [change(0, "B", "thread (9): MainThread"), change(0, "B", "a")]
    for ts_us in range(5_000_000, 9_000_000, 100_000):
        events += [change(ts_us, "E", "a"), change(ts_us, "B", "a")]
    log = log_of([1_000_000, 2_000_000, 3_000_000], 9)
    with pytest.raises(NotUnderstood, match="cannot be told"):
        sampled(json.dumps(events).encode(), log)
