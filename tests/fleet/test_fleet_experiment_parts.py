# SPDX-License-Identifier: Apache-2.0
"""The plan, the load, what counts as fresh, what may be compared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from analyze_runs import Truth, write_run
from hypothesis import given
from hypothesis import strategies as st

from fleet.analyze.records import read_run
from fleet.analyze.refusals import found_warm, refusals
from fleet.experiment import fleets
from fleet.experiment.__main__ import ExperimentError, _record, check_slots
from fleet.experiment.arm import RUN_ERRORS, _before
from fleet.experiment.config import (
    Arm,
    Experiment,
    Given,
    Workload,
    read_experiment,
)
from fleet.experiment.fleets import fresh_fleet
from fleet.experiment.freshness import COUNTERS, Freshness, counted, judge
from fleet.experiment.machine import (
    BUSY_LIMIT,
    EXCESS_LIMIT,
    LATE_LIMIT,
    CpuSampler,
    EngineLag,
    machine_load,
)
from fleet.experiment.plan import plan
from fleet.experiment.workload import TraceFacts, make_workload
from fleet.instances import Instance, InstancesError, write_instances
from fleet.trace import Request, TraceError, read_trace
from fleet.trace.own import write
from lab.config import ConfigError
from lab.paths import CONFIGS

EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.toml"))
REPOSITORY = CONFIGS.parent


def experiment(**changes) -> Experiment:
    arms = {"a": Arm("linear"), "b": Arm("round_robin"), "again": Arm("linear")}
    fields = {
        "summary": "x",
        "workload": Workload("t"),
        "arms": arms,
        "baseline": "a",
        "standin": [],
    }
    return Experiment(**(fields | changes))


# The files and the plan


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_committed_experiment_is_read_and_has_an_aa_pair(path):
    committed = read_experiment(path)
    assert (REPOSITORY / committed.workload.trace).exists()
    assert any(run.same_as for run in plan(committed))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_committed_experiment_has_sessions_for_all_its_slots(path, tmp_path):
    committed = read_experiment(path)
    facts = make_workload(
        committed.workload,
        REPOSITORY / committed.workload.trace,
        tmp_path / "trace.jsonl.gz",
        not committed.open_loop,
        committed.seed,
    )
    check_slots(committed, facts.sessions)


def test_fewer_sessions_than_slots_are_refused_in_a_closed_loop_alone():
    wanted = experiment(concurrency=[2, 15])
    check_slots(wanted, sessions=60)
    with pytest.raises(ExperimentError, match=r"59 sessions .* 60 slots .*`copies`"):
        check_slots(wanted, sessions=59)
    check_slots(experiment(concurrency=[15], open_loop=True), sessions=1)


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 15), min_size=1, max_size=4, unique=True),
)
def test_each_arm_runs_once_a_repeat_and_repeats_alternate_in_direction(
    repeats, concurrency
):
    runs = plan(experiment(repeats=repeats, concurrency=concurrency))
    assert set(Counter(run.folder for run in runs).values()) == {1}
    by_repeat = defaultdict(list)
    for run in runs:
        by_repeat[run.repeat].append(run.label)
    assert len(by_repeat) == repeats
    for repeat, labels in by_repeat.items():
        assert labels == by_repeat[0][:: -1 if repeat % 2 else 1]


def test_an_arm_is_compared_at_its_own_concurrency():
    runs = {run.label: run for run in plan(experiment(concurrency=[2, 8]))}
    assert runs["b@8"].baseline == "a@8"
    assert runs["again@2"].same_as == "a@2"
    assert runs["a@2"].same_as is runs["b@2"].same_as is None


def test_an_aa_twin_is_known_wherever_it_stands_in_the_file():
    arms = {"first": Arm("linear"), "a": Arm("linear"), "last": Arm("linear")}
    same = {run.label: run.same_as for run in plan(experiment(arms=arms))}
    assert same == {"first@8": "a@8", "a@8": None, "last@8": "a@8"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"baseline": "c"}, "'c' is no arm"),
        ({"profile": "p"}, "one of"),
        ({"standin": None}, "one of"),
        ({"time_factor": 2.0}, "`time_factor` is for the forward of a `profile`"),
        ({"arms": {"a": Arm("lineer")}}, "arm 'a'.*lineer"),
        ({"arms": {"a": Arm("linear", {"alfa": 1})}}, "arm 'a'.*alfa"),
        (
            {
                "standin": None,
                "profile": "p",
                "arms": {"a": Arm("linear", roles=["both"])},
            },
            "1 `roles` for 4",
        ),
        ({"arms": {"a": Arm("linear", connector="noop")}}, "arm 'a': `connector`"),
        ({"arms": {"a": Arm("linear", roles=["both"] * 4)}}, "arm 'a': `roles`"),
        (
            {
                "standin": None,
                "given": Given("instances.json", ["true"]),
                "arms": {"a": Arm("linear", connector="noop")},
            },
            "arm 'a': `connector`",
        ),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(changes, what, tmp_path):
    with pytest.raises(ValueError, match=what):
        experiment(**changes)


def test_a_wrong_experiment_file_is_named(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text("summary = 1")
    with pytest.raises(ConfigError, match=r"e\.toml.*summary"):
        read_experiment(path)


# The load


def source(folder: Path, sessions: int, turns: int) -> Path:
    path = folder / "source.jsonl"
    requests = [
        Request(
            arrival_s=float(session + turn),
            session=f"s{session}",
            turn=turn,
            input_tokens=16 * (turn + 1),
            output_tokens=50,
            hashes=[session * 100 + block for block in range(turn + 1)],
            block_tokens=16,
            think_s=None if turn == 0 else 9.0,
        )
        for session in range(sessions)
        for turn in range(turns)
    ]
    requests.sort(key=lambda one: one.arrival_s)
    write(path, {"requests": len(requests)}, requests)
    return path


def load(folder: Path, workload: Workload, closed_loop: bool = True, seed: int = 0):
    path = source(folder, sessions=6, turns=4)
    facts = make_workload(workload, path, folder / "out.jsonl", closed_loop, seed)
    return facts, list(read_trace(folder / "out.jsonl"))


def test_whole_sessions_are_drawn_and_the_cuts_are_what_was_declared(tmp_path):
    workload = Workload(
        "t", sessions=3, max_turns=2, max_output_tokens=7, max_think_s=1.0
    )
    facts, requests = load(tmp_path, workload)
    turns = defaultdict(list)
    for one in requests:
        turns[one.session].append(one.turn)
        assert one.output_tokens == 7
        assert one.think_s == (None if one.turn == 0 else 1.0)
    assert list(turns.values()) == [[0, 1]] * 3
    assert (facts.sessions, facts.requests) == (3, 6)
    assert facts.input_tokens == sum(one.input_tokens for one in requests)


def test_equal_seeds_give_equal_loads_and_others_do_not(tmp_path):
    workload = Workload("t", sessions=3)
    hashes = [load(tmp_path, workload, seed=seed)[0].sha256 for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_copies_share_no_block_with_each_other(tmp_path):
    facts, requests = load(tmp_path, Workload("t", copies=3))
    assert facts.sessions == 18
    blocks = defaultdict(set)
    for one in requests:
        blocks[one.session] |= set(one.hashes)
    everyone = [block for own in blocks.values() for block in own]
    assert len(everyone) == len(set(everyone))


def test_a_closed_loop_has_everyone_at_the_gate_and_an_open_one_keeps_arrivals(
    tmp_path,
):
    assert {one.arrival_s for one in load(tmp_path, Workload("t"))[1]} == {0.0}
    _, kept = load(tmp_path, Workload("t"), closed_loop=False)
    assert [one.arrival_s for one in kept] == sorted(
        one.arrival_s for one in read_trace(tmp_path / "source.jsonl")
    )


def test_more_sessions_than_there_are_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"6 sessions where .* 7"):
        load(tmp_path, Workload("t", sessions=7))


# Fresh


def metrics(**values: float) -> str:
    counters = dict.fromkeys(COUNTERS, 0.0) | {
        f"vllm:{name}": value for name, value in values.items()
    }
    rows = []
    for name, value in counters.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        rows.append(f"# TYPE {name.removesuffix('_total')} {kind}")
        rows.append(f'{name}{{engine="0"}} {value}')
    return "\n".join(rows) + "\n"


def judged(**fields) -> Freshness:
    evidence = Freshness(**({"instances": {"i0": counted(metrics())}} | fields))
    judge(evidence)
    return evidence


def test_an_instance_that_has_served_nothing_is_fresh():
    assert judged().fresh
    assert judged().why is None


@pytest.mark.parametrize("name", [*COUNTERS, "vllm:kv_cache_usage_perc"])
def test_an_instance_that_has_served_anything_is_not_fresh(name):
    text = metrics(**{name.removeprefix("vllm:"): 3.0})
    evidence = judged(instances={"i0": counted(metrics()), "i1": counted(text)})
    assert not evidence.fresh
    assert name in evidence.why
    assert "i1" in evidence.why


def test_what_cannot_be_seen_is_not_taken_for_fresh():
    assert not judged(instances={}).fresh
    assert "missing" in judged(instances={"i0": {}}).why


def test_a_first_step_that_finds_blocks_is_not_fresh():
    assert judged(first_step_cached_blocks={"i0": 0}).fresh
    assert "found 5 blocks" in judged(first_step_cached_blocks={"i0": 5}).why


def test_a_gpu_that_somebody_uses_is_not_fresh():
    assert judged(gpu_used_mib=[3, 500]).fresh
    assert "GPU 1: 9000 MiB" in judged(gpu_used_mib=[3, 9000]).why


def test_what_an_earlier_run_left_running_is_not_fresh():
    assert judged(survivors=[]).fresh
    assert "earlier run are still there: [77]" in judged(survivors=[77]).why


def before(**source) -> Freshness:
    """What is seen before a run of two instances of this `source`."""
    two = experiment(**({"standin": None, "instances": 2} | source))
    facts = TraceFacts("t", "", "t", 1, 1, 1, 1)
    return _before(_record(two, plan(two)[0], facts, {}), two)


@pytest.fixture
def used_gpus(tmp_path, monkeypatch) -> Path:
    """Three GPUs, all in use; the folder of their profile."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '9000\\n5\\n8000\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    text = (CONFIGS / "fleet" / "h20-30b-a3b.toml").read_text()
    on_gpus = text.replace('flavour = "cpu"', 'flavour = "gpu"')
    (tmp_path / "gpu.toml").write_text(on_gpus)
    return tmp_path


def test_gpus_matter_where_instances_are_started_on_them_and_only_those(used_gpus):
    assert before(profile=f"{used_gpus}/gpu").gpu_used_mib == [9000, 5]
    assert before(profile="h20-30b-a3b").gpu_used_mib is None
    assert before(given=Given("x", ["true"])).gpu_used_mib is None
    assert before(standin=[]).gpu_used_mib is None


def test_a_process_that_outlived_its_run_is_seen_before_the_next():
    assert before(standin=[]).survivors == []
    with subprocess.Popen(["sleep", "60"]) as left:
        assert before(standin=[]).survivors == [left.pid]
        assert before(given=Given("x", ["true"])).survivors is None
        left.kill()


# Instances that somebody else started


def restarted(*command: str, instances: int = 1, file: Path = Path("none")) -> None:
    given_there = Given(str(file), list(command))
    elsewhere = experiment(standin=None, given=given_there, instances=instances)
    with fresh_fleet(elsewhere, Arm("linear"), None, Path()):
        pass


@pytest.mark.parametrize(
    ("restart", "what"),
    [
        (["no-such-program"], r"`restart` \(no-such-program\) cannot be run"),
        (["sh", "-c", "echo why >&2; exit 3"], "status 3:\nwhy"),
        (["sleep", "60"], r"\(sleep 60\) did not end within 1 s"),
    ],
)
def test_a_restart_that_does_not_work_is_a_failed_run(restart, what, monkeypatch):
    monkeypatch.setattr(fleets, "READY_DEADLINE_S", 1.0)
    with pytest.raises(RUN_ERRORS, match=what):
        restarted(*restart)


def test_a_restart_is_not_waited_for_beyond_its_own_end():
    began = time.monotonic()
    with pytest.raises(InstancesError, match="none"):
        restarted("sh", "-c", "sleep 8 & true")
    assert time.monotonic() - began < 4


def test_a_file_of_more_instances_than_the_experiment_counts_on_is_refused(tmp_path):
    file = tmp_path / "instances.json"
    write_instances(file, [Instance("a", "http://x"), Instance("b", "http://y")])
    with pytest.raises(RUN_ERRORS, match=r"2 instances .*`instances = 4`"):
        restarted("true", instances=4, file=file)


# The machine


def sampled(busy: float) -> CpuSampler:
    with CpuSampler() as sampler:
        pass
    sampler._samples = [(0, 0), (int(1000 * busy), 1000)]
    return sampler


def lag(late: float, excess: float) -> EngineLag:
    return EngineLag(steps=10, step_s=1 + excess, simulated_s=1.0, slept_s=1 + late)


def test_a_machine_that_keeps_up_is_not_saturated():
    found = machine_load(sampled(BUSY_LIMIT - 0.05), 2, {"i0": lag(0.01, 0.05)})
    assert found.saturated is None
    assert found.engine_excess == pytest.approx(0.05)
    assert found.engine_late == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("busy", "late", "excess", "what"),
    [
        (BUSY_LIMIT + 0.05, 0, 0, "cores were busy"),
        (0.1, LATE_LIMIT + 0.02, 0, "longer than simulated"),
        (0.1, 0, EXCESS_LIMIT + 0.1, "longer than their simulated forward"),
    ],
)
def test_each_sign_of_a_machine_that_does_not_keep_up_makes_a_run_invalid(
    busy, late, excess, what
):
    found = machine_load(sampled(busy), 2, {"i0": lag(late, excess)})
    assert what in found.saturated


@pytest.mark.slow
def test_a_core_that_a_child_keeps_busy_is_seen_and_is_our_own():
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    with CpuSampler() as sampler:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", spin], check=True)
        took_s = time.monotonic() - began
    assert 0 < sampler.busy()[0] <= 1
    assert sampler.busy_own(cores=1) >= 0.9 * 0.5 / took_s


# What may be compared


def pair(folder: Path, **worse) -> list:
    """Two arms; `worse` is what is wrong with the second one."""
    base = {"policy": "linear", "concurrency": 2, "baseline": "a"}
    arms = [Truth("a", **base), Truth("b", **(base | {"policy": "lmetric"} | worse))]
    return read_run(write_run(folder, arms))


def test_arms_that_differ_in_their_policy_alone_are_compared(tmp_path):
    assert refusals(pair(tmp_path), "b", "a") == []


@pytest.mark.parametrize(
    ("worse", "what"),
    [
        ({"fresh": False}, "cold caches"),
        ({"status": "failed"}, "the run failed"),
        ({"saturated": "cores"}, "did not keep up"),
        ({"valid": False}, "sent late"),
        ({"fails": 1}, "did not end ok differ"),
        ({"sessions": 39}, "requests differ"),
        ({"repeats": 1}, "repeats are not the same"),
        ({"concurrency": 8}, "concurrency differs"),
    ],
)
def test_a_comparison_is_refused_with_the_reason(worse, what, tmp_path):
    runs = pair(tmp_path, **worse)
    for arm, baseline in (("a", "b"), ("b", "a")):
        assert any(what in reason for reason in refusals(runs, arm, baseline))


def test_an_arm_that_did_not_run_is_not_compared(tmp_path):
    assert refusals(pair(tmp_path), "c", "a") == ["there is no run of c"]


def test_a_warm_instance_shows_in_the_records_alone(tmp_path):
    """Counters can be reset; what a request found cached was there."""
    requests = pair(tmp_path)[0].requests
    assert found_warm(requests) is None
    first = min(requests, key=lambda one: one.sent_ns)
    first.cached_tokens = 512
    assert f"{first.instance} found 512 tokens" in found_warm(requests)
    first.prefill_instance = "another"
    assert found_warm(requests) is None
