# SPDX-License-Identifier: Apache-2.0
"""A sample says what a thread was doing at the moment that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from kvtax.records.stacks import SampledStacks, read_stacks
from microbench.py_spy import FAILED, NotUnderstood, sampled
from tests.proc.living import content

LATE_NS = 20_000_000
# More frames than py-spy reads: such a sample fails.
DEEP = 5000
# Computes and waits in turn, and says when it did which. A thread waits all the time.
# The lengths are random: equal ones would keep step with the samples.
# Every fourth wait is so many calls deep as its second argument says.
PROGRAM = """
import json, random, sys, threading, time

def computes(until):
    while time.perf_counter() < until:
        pass

def waits(depth):
    if depth:
        return waits(depth - 1)
    time.sleep(random.uniform(0.05, 0.15))

def waits_in_vain():
    threading.Event().wait()

threading.Thread(target=waits_in_vain, name="waiter", daemon=True).start()
folder, began, turns = sys.argv[1], time.perf_counter(), []
depth = int(sys.argv[2])
sys.setrecursionlimit(depth + 100)
header = {"schema": "kvtax.engine_step/1", "pid": __import__("os").getpid()}
open(f"{folder}/engine_step.jsonl", "w").write(json.dumps(header) + "\\n")
while time.perf_counter() < began + 60:
    first = time.perf_counter_ns()
    computes(time.perf_counter() + random.uniform(0.05, 0.15))
    turns.append((first, time.perf_counter_ns()))
    with open(f"{folder}/turns.partial", "a") as out:
        out.write(json.dumps(turns[-1]) + "\\n")
    waits(0 if len(turns) % 4 else depth)
"""


def sample(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "microbench.py_spy", str(folder), *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.fixture(scope="module", params=[0, DEEP], ids=["all read", "some failed"])
def recorded(request, tmp_path_factory) -> tuple[Path, SampledStacks]:
    folder = tmp_path_factory.mktemp("records")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(folder), str(request.param)]
    with subprocess.Popen(command) as process:
        try:
            content(folder / "engine_step.jsonl")
            done = sample(folder, "--seconds", "6")
        finally:
            process.kill()
    assert done.returncode == 0, done.stderr
    return folder, read_stacks(folder / f"stacks.{process.pid}.json")


def samples_of(found: SampledStacks, name: str) -> list[tuple[int, list[int]]]:
    """(t_ns, frames) of each sample of the thread `name`."""
    thread = [one.name for one in found.threads].index(name)
    of_thread = [one for one in found.samples if one.thread == thread]
    return [(one.t_ns, found.stacks[one.stack]) for one in of_thread]


def frames_of(found: SampledStacks, name: str) -> list[tuple[int, list[str]]]:
    samples = samples_of(found, name)
    return [(t_ns, [found.frames[at] for at in stack]) for t_ns, stack in samples]


@pytest.mark.slow
def test_what_was_done_at_the_moment_of_a_sample_is_what_it_shows(recorded):
    folder, found = recorded
    lines = (folder / "turns.partial").read_text().splitlines()
    turns = [json.loads(line) for line in lines]
    main = frames_of(found, "MainThread")
    assert len(main) > 100
    wrong = 0
    for t_ns, frames in main:
        shown = any(frame.startswith("computes ") for frame in frames)
        # Where the cores are busy, a stop is noted late.
        true = {
            any(first <= at_ns < last for first, last in turns)
            for at_ns in range(t_ns - LATE_NS, t_ns + 1, LATE_NS // 20)
        }
        wrong += shown not in true
    assert wrong <= 0.02 * len(main)
    computed = sum(any(f.startswith("computes ") for f in of) for _, of in main)
    # Both were seen; how often depends on what else runs.
    assert 10 < computed < len(main) - 10


@pytest.mark.slow
def test_a_thread_that_only_waits_is_shown_where_it_waits(recorded):
    _, found = recorded
    waits = frames_of(found, "waiter")
    assert len(waits) > 100
    assert all(any(f.startswith("waits_in_vain ") for f in of) for _, of in waits)


@pytest.mark.slow
def test_nothing_is_left_but_the_stacks(recorded):
    folder, found = recorded
    left = {path.name for path in folder.iterdir()}
    known = {"program.py", "engine_step.jsonl", "turns.partial"}
    assert left == known | {f"stacks.{found.pid}.json"}


@pytest.mark.slow
def test_a_process_that_is_gone_is_named(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    header = {"schema": "kvtax.engine_step/1", "pid": ended.pid}
    (tmp_path / "engine_step.jsonl").write_text(json.dumps(header) + "\n")
    done = sample(tmp_path, "--seconds", "1")
    assert done.returncode == 1
    assert f"cannot sample process {ended.pid}" in done.stderr
    assert not list(tmp_path.glob("stacks*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "what"), [((), "no engine_step"), (("--seconds", "0"), "above 0")]
)
def test_what_cannot_be_sampled_is_refused_with_what_to_do(tmp_path, options, what):
    done = sample(tmp_path, *options)
    assert done.returncode == 1
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def log_of(stops: list[dict[int, int]], errors: int = 0) -> str:
    """A log with a stop for names, and one for each of `stops`: ns by thread."""
    lines = []
    for number, stop in enumerate([{9: 1}, *stops]):
        for tid, t_ns in stop.items():
            lines.append(f"[{_utc(t_ns)} DEBUG remoteprocess] attached to thread {tid}")
        if number == 0:
            lines.append("[INFO py_spy::python_spy] looking up thread names")
        for tid, t_ns in stop.items():
            at = _utc(t_ns + 1_000)
            lines.append(f"[{at} DEBUG remoteprocess] detached from thread {tid}")
    return "\n".join([*lines, f"py-spy> Samples: 1 Errors: {errors}"])


def _utc(t_ns: int) -> str:
    return f"1970-01-01T00:00:{t_ns // 10**9:02}.{t_ns % 10**9:09}Z"


def written(**stacks_of: list[int]) -> bytes:
    """A file in which each sample of `t7` has the one frame that is its number."""
    profiles = [
        {"name": f'Thread {name[1:]} "{name}"', "samples": [[at] for at in of]}
        for name, of in stacks_of.items()
    ]
    frames = [{"name": f"f{number}", "file": "", "line": 0} for number in range(100)]
    return json.dumps({"shared": {"frames": frames}, "profiles": profiles}).encode()


def times_of(found: SampledStacks, name: str) -> list[tuple[int, int]]:
    """(t_ns, frame) of each sample of a thread."""
    return [(t_ns, stack[0]) for t_ns, stack in samples_of(found, name)]


@pytest.mark.parametrize("unwritten", [1, 2, 3])
def test_the_stop_for_names_and_the_last_ones_are_no_samples(unwritten):
    stops = [{9: 1_000_000 * number} for number in range(1, 50)]
    samples = list(range(len(stops) - unwritten))
    found = sampled(written(t9=samples), log_of(stops))
    shown = times_of(found, "t9")
    assert shown == [(stops[at][9], at) for at in samples]


def test_any_number_of_stops_may_follow_when_all_planned_samples_are_there():
    """A busy machine lets the thread that samples run on."""
    log = log_of(stops := [{9: 1_000_000 * number} for number in range(1, 50)])
    samples = list(range(29))
    planned = "py-spy> Sampling process 5 times a second for {} seconds.\n"
    found = sampled(written(t9=samples), planned.format(6) + log)
    assert times_of(found, "t9") == [(stops[at][9], at) for at in samples]
    with pytest.raises(NotUnderstood, match="29 samples were written"):
        sampled(written(t9=samples), planned.format(7) + log)


@pytest.mark.parametrize("logged_late", [False, True])
def test_a_sample_that_failed_has_no_time_and_the_others_keep_theirs(logged_late):
    stops = [{9: 1_000_000 * number, 5: 1} for number in range(1, 50)]
    lines = log_of(stops, errors=3).splitlines()
    warned = "[WARN py_spy] Failed to get stack trace from 9: Failed to"
    for failed in (30, 7):
        stopped = f"[{_utc(stops[failed][9])} DEBUG remoteprocess] attached to thread 9"
        at = lines.index(stopped) + (5 if logged_late else 4)
        lines.insert(at, f"{warned} read")
    lines.insert(40, f"{warned} suspend process")
    log = "\n".join(lines)
    samples = [at for at in range(len(stops) - 1) if at not in (30, 7)]
    found = sampled(written(t9=samples), log)
    assert times_of(found, "t9") == [(stops[at][9], at) for at in samples]


def test_threads_that_begin_or_end_on_the_way_keep_their_times():
    stops = [
        {9: 1_000 * at, 5: 1_000 * at + 1, 6: 1_000 * at + 2} for at in range(1, 41)
    ]
    # One is not there for long; one is there for ten stops before it runs Python.
    for stop in stops[:10]:
        del stop[6]
    for stop in stops[30:]:
        del stop[5]
    ends = list(range(30))
    begins = list(range(20, 38))
    found = sampled(written(t9=list(range(38)), t5=ends, t6=begins), log_of(stops))
    assert times_of(found, "t5") == [(stops[at][5], at) for at in ends]
    assert times_of(found, "t6") == [(stops[at][6], at) for at in begins]
    assert [one.t_ns for one in found.samples] == sorted(
        one.t_ns for one in found.samples
    )


@pytest.mark.parametrize(
    ("samples", "log", "what"),
    [
        (b"{", log_of([{9: 1}]), "no file of speedscope's"),
        (b"[]", log_of([{9: 1}]), "no file of speedscope's"),
        (written(), log_of([{9: 1}]), "0 samples were written"),
        (written(t9=[1, 2]), log_of([{9: 1}]), "2 samples .* stopped for 1"),
        (written(t9=[1, 2]), log_of([{9: at} for at in range(9)]), "stopped for 9"),
        (written(t9=[1]), log_of([{9: 1}, {9: 2}], errors=2), "2 samples failed, a"),
        (written(t9=[1]), log_of([{9: 1}, {9: 2}], 1) + FAILED, "failed, of 2"),
        (written(t9=[1]), "killed", "unknown number"),
        (written(t9=[1], t5=[1]), log_of([{9: 1}, {9: 2}]), "thread 5 has 1 samples"),
    ],
)
def test_output_that_is_not_what_is_known_of_it_is_refused(samples, log, what):
    with pytest.raises(NotUnderstood, match=what):
        sampled(samples, log)
