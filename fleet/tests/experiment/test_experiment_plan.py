# SPDX-License-Identifier: Apache-2.0
"""The files of configs/experiments/, what they may say, and the order of the runs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import pytest
from fleet.tests.experiment.small_experiment import experiment, smoke_of
from fleet.tests.replay.replay_lab import trace, write_trace
from fleet.tests.simulate.two_arms import two_arms
from hypothesis import given
from hypothesis import strategies as st
from kvtax.cli import Exit, main
from kvtax.config import ConfigError
from kvtax.run_folder import RunFolderError

from kvtax_fleet.experiment.config import (
    Arm,
    Workload,
    check_arms,
    read_experiment,
)
from kvtax_fleet.experiment.experiment_plan import (
    ExperimentError,
    check_slots,
    plan,
    planned_arm,
    prepare,
)
from kvtax_fleet.experiment.workload import make_workload
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.paths import CONFIGS, FLEET
from kvtax_fleet.records.arm import TraceFacts
from kvtax_fleet.replay.options import ReplayError

EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_committed_experiment_is_read_and_has_an_aa_pair(path):
    """In virtual time equal arms are equal to the byte, and a twin is there."""
    committed = read_experiment(path)
    check_arms(committed)
    assert (FLEET / committed.workload.trace).exists()
    unpaired = ("in virtual time", "its virtual twin")
    if not any(words in committed.summary for words in unpaired):
        assert any(run.same_as for run in plan(committed))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_committed_experiment_has_sessions_for_all_its_slots(path, tmp_path):
    committed = read_experiment(path)
    facts = make_workload(
        committed.workload,
        tmp_path / "trace.jsonl.gz",
        not committed.open_loop,
        committed.seed,
    )
    check_slots(committed, facts.sessions)


def test_an_arm_keeps_no_secret_of_its_servers(tmp_path):
    text = (CONFIGS / "profiles" / "gpu-30b-a3b.toml").read_text()
    profile = tmp_path / "profile.toml"
    key = 'server_args = ["--api-key", "sesame", '
    profile.write_text(text.replace("server_args = [", key))
    wanted = experiment(profile=str(profile.with_suffix("")))
    facts = TraceFacts("t", "", "t", 1, 1, 1, 1)
    arm = planned_arm(wanted, plan(wanted)[0], facts, {})
    assert arm.profile["server_args"][:2] == ["--api-key", "***"]
    assert "sesame" not in str(arm)


def test_fewer_sessions_than_slots_are_refused_in_a_closed_loop_alone():
    wanted = experiment(concurrency=[2, 15])
    check_slots(wanted, sessions=60)
    with pytest.raises(ExperimentError, match=r"59 sessions .* 60 slots .*`copies`"):
        check_slots(wanted, sessions=59)
    check_slots(experiment(concurrency=[15], open_loop=True), sessions=1)


@pytest.mark.slow
def test_a_trace_longer_than_the_context_is_refused_before_a_fleet_starts(
    tmp_path, capsys
):
    long_trace = tmp_path / "long.jsonl"
    write_trace(long_trace, trace(8, 1, input_tokens=65_535, output_tokens=2))
    config = tmp_path / "two_arms.toml"
    committed = "traces/claude_code_sessions_le62k.jsonl.xz"
    config.write_text(two_arms([1], 1).replace(committed, str(long_trace)))
    out = tmp_path / "out"
    status = main(["fleet", str(config), "--virtual", "--out", str(out)])
    assert status == Exit.BAD_INPUT
    printed = capsys.readouterr().err
    assert "8 requests are longer than the 65536 tokens" in printed
    assert "h20-30b-a3b" in printed and "max_model_len" in printed
    assert not out.exists()


def test_a_request_beyond_the_kv_cache_is_refused_before_a_fleet_starts(tmp_path):
    profile = tmp_path / "small.toml"
    text = (CONFIGS / "profiles" / "h20-30b-a3b.toml").read_text()
    profile.write_text(re.sub(r"(?m)^num_blocks = .*", "num_blocks = 101", text))
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    for tokens, fits in ((1598, True), (1599, False)):
        write_trace(file, trace(8, 1, input_tokens=tokens, output_tokens=2))
        wanted = experiment(
            profile=str(profile.with_suffix("")),
            workload=Workload(str(file)),
            concurrency=[1],
        )
        if fits:
            prepare(wanted, out / "fits", True)
            continue
        with pytest.raises(ReplayError, match="8 requests are longer than the 1600"):
            prepare(wanted, out / "long", True)
    assert [path.name for path in out.iterdir()] == ["fits"]


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 15), min_size=1, max_size=4, unique=True),
)
def test_each_arm_runs_once_a_repeat_and_repeats_alternate_in_direction(
    repeats, concurrency
):
    runs = plan(experiment(repeats=repeats, concurrency=concurrency))
    assert set(Counter(run.name for run in runs).values()) == {1}
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


@pytest.mark.parametrize(
    ("arm", "what"),
    [
        (Arm("elastic"), "a `connector` that moves KV"),
        (Arm("pd_sep", connector="mooncake_both"), "prefill and decode"),
        (
            Arm("pd_sep", connector="mooncake_both", roles=["prefill", *["both"] * 3]),
            "prefill and decode",
        ),
        (Arm("linear", roles=["both", "decode"] * 2), "role decode needs a connector"),
        (Arm("linear", connector="observatory/lmcache"), "needs a companion"),
        (
            Arm("linear", connector="mooncake_both", roles=["prefill"] * 4),
            "no instance has a role that answers",
        ),
    ],
)
def test_what_an_arm_needs_is_missed_before_anything_is_started(arm, what):
    arms = {"a": Arm("linear"), "b": arm}
    launched = experiment(profile="h20-30b-a3b", arms=arms)
    with pytest.raises(ConfigError, match=f"arm 'b': .*{what}"):
        check_arms(launched)


def test_a_run_goes_on_as_the_same_experiment_in_the_same_time_alone(tmp_path):
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    write_trace(file, trace(8, 1))
    load = Workload(str(file))
    wanted = experiment(workload=load, concurrency=[2])
    prepare(wanted, out, False)
    prepare(wanted, out, False)
    with pytest.raises(RunFolderError, match="its runs are in real time"):
        prepare(wanted, out, True)
    other = experiment(workload=load, concurrency=[2], repeats=3)
    with pytest.raises(RunFolderError, match="experiment is another in `repeats`"):
        prepare(other, out, False)


def test_in_virtual_time_an_arm_that_equals_another_does_not_run():
    arms = {"first": Arm("linear"), "a": Arm("linear"), "b": Arm("lmetric")}
    runs = plan(experiment(arms=arms, repeats=3), virtual=True)
    assert Counter(run.label for run in runs) == {"a@8": 3, "b@8": 3}


def test_an_aa_twin_is_known_wherever_it_stands_in_the_file():
    arms = {"first": Arm("linear"), "a": Arm("linear"), "last": Arm("linear")}
    same = {run.label: run.same_as for run in plan(experiment(arms=arms))}
    assert same == {"first@8": "a@8", "a@8": None, "last@8": "a@8"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"baseline": "c"}, "'c' is no arm"),
        ({"concurrency": [2, 8, 2]}, "`concurrency` has a number twice"),
        *(
            ({"baseline": name, "arms": {name: Arm("linear")}}, "give it a name of")
            for name in ("", "..", "../a", "a/b", "a@2", "a b", "a" * 101)
        ),
        ({"arms": {"a": Arm("lineer")}}, "arm 'a'.*lineer"),
        ({"arms": {"a": Arm("linear", {"alfa": 1})}}, "arm 'a'.*alfa"),
        ({"arms": {"a": Arm("linear", roles=["both"])}}, "1 `roles` for 4"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(changes, what, tmp_path):
    with pytest.raises(ValueError, match=what):
        experiment(**changes)


BASE = smoke_of(1)
WRONG_FILES = {
    "a wrong type": (b"summary = 1", "summary"),
    "no UTF-8": (b'summary = "\xff"', "utf-8"),
    "no TOML": (b"{}", "line 1"),
    "an unknown key": (f"repeat = 1\n{BASE}".encode(), "`repeat`"),
    "an unknown table": (f"{BASE}[load]\n".encode(), "`load`"),
    **{
        f"{name} {value}": (
            f"{name} = {value}\n{re.sub(rf'(?m)^{name} = .*', '', BASE)}".encode(),
            name,
        )
        for name, values in {
            "instances": ("0", "-1", "1000000", "2.0", "true", '"2"'),
            "concurrency": ("[]", "[0]", "[1_000_000_000]", "2"),
            "repeats": ("0", "1_000_000_000"),
            "seed": ("1.5", "99_999_999_999_999_999_999"),
            "time_scale": ("0", "0.0001", "-1", "inf", "nan"),
            "request_timeout_s": ("0", "inf"),
            "lag_budget_ms": ("0", "nan"),
            "time_factor": ("0.0", "inf"),
            "virtual": ("{ scheduling = 1 }", "{ event_loss = 0.5 }"),
        }.items()
        for value in values
    },
    "too many copies": (
        BASE.replace("[workload]", "[workload]\ncopies = 1025").encode(),
        "copies",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_a_wrong_experiment_file_is_refused_by_file_and_field(wrong, tmp_path):
    content, what = WRONG_FILES[wrong]
    path = tmp_path / "e.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"e\.toml: .*{what}"):
        read_experiment(path)


def test_the_experiment_that_wrong_files_are_made_of_is_right(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(BASE)
    assert read_experiment(path).name == "e"


@pytest.mark.parametrize(
    "field",
    ["block_size = 0", "num_blocks = -1", "max_model_len = 0", "forward_us = -1"],
)
def test_a_fleet_profile_of_no_size_is_refused(field, tmp_path):
    name = field.partition(" ")[0]
    text = (CONFIGS / "profiles" / "h20-30b-a3b.toml").read_text()
    path = tmp_path / "p.toml"
    path.write_text(re.sub(rf"(?m)^{name} = .*", field, text))
    with pytest.raises(ConfigError, match=rf"p\.toml: .*{name}"):
        read_instance_settings(path)
