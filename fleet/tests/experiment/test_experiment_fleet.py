# SPDX-License-Identifier: Apache-2.0
"""Fleets: restarted instances, evidence from before the start, parts on hosts."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from fleet.tests.experiment.small_experiment import experiment
from hypothesis import given
from hypothesis import strategies as st
from kvtax.hosts.clock import Clock, Reading
from kvtax.proc.ports import LOOPBACK
from tests.fake_gpu import H100, path_with_gpus

from kvtax_fleet.experiment import host_fleet
from kvtax_fleet.experiment.arm_run import RUN_ERRORS
from kvtax_fleet.experiment.config import Arm, Given
from kvtax_fleet.experiment.fleet import fleet_here
from kvtax_fleet.experiment.fleet_on_hosts import deal, most_hosts
from kvtax_fleet.experiment.fleet_worker import shift_clock
from kvtax_fleet.experiment.host_fleet import HostFleet, Start, Started
from kvtax_fleet.instances import InstancesError, write_instances
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.instances import Instance


def restarted(*command: str, instances: int = 1, file: Path = Path("none")) -> None:
    given_there = Given(str(file), list(command))
    elsewhere = experiment(standin=None, given=given_there, instances=instances)
    with fleet_here(elsewhere, Workshop(Path()), Path(), Path("no-folder")) as fleet:
        fleet.start(Arm("linear"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("restart", "what"),
    [
        (["no-such-program"], r"`restart` \(no-such-program\) cannot be run"),
        (["sh", "-c", "echo why >&2; exit 3"], "status 3:\nwhy"),
        (["sleep", "60"], r"\(sleep 60\) did not end within 1 s"),
    ],
)
def test_a_restart_that_does_not_work_is_a_failed_run(restart, what, monkeypatch):
    monkeypatch.setattr(host_fleet, "READY_DEADLINE_S", 1.0)
    with pytest.raises(RUN_ERRORS, match=what):
        restarted(*restart)


def test_a_restart_is_not_waited_for_beyond_its_own_end():
    began = time.monotonic()
    with pytest.raises(InstancesError, match="none"):
        restarted("sh", "-c", "sleep 60 & true")
    assert time.monotonic() - began < 50


def test_a_file_of_more_instances_than_the_experiment_counts_on_is_refused(tmp_path):
    file = tmp_path / "instances.json"
    write_instances(file, [Instance("a", "http://x"), Instance("b", "http://y")])
    with pytest.raises(RUN_ERRORS, match=r"2 instances .*`instances = 4`"):
        restarted("true", instances=4, file=file)


rooms = st.lists(st.integers(0, 5), max_size=6)
instances = st.integers(1, 12)


@given(rooms, instances)
def test_no_host_is_given_more_than_it_has_room_for_and_no_more_could_be_used(
    rooms: list[int], instances: int
) -> None:
    def works(hosts: int) -> bool:
        share, rest = divmod(instances, hosts)
        return rest == 0 and sum(room >= share for room in rooms) >= hosts

    found = most_hosts(rooms, instances)
    if found is not None:
        assert works(found)
    above = range((found or 0) + 1, len(rooms) + 1)
    assert not any(works(hosts) for hosts in above)


@given(st.integers(1, 6), st.integers(1, 4))
def test_each_instance_is_on_one_host_and_neighbours_are_on_different_ones(
    hosts: int, share: int
) -> None:
    found = deal(hosts * share, hosts)
    assert [len(own) for own in found] == [share] * hosts
    host_of = {number: host for host, own in enumerate(found) for number in own}
    assert sorted(host_of) == list(range(hosts * share))
    if hosts > 1:
        assert all(host_of[one] != host_of[one - 1] for one in range(1, len(host_of)))


AHEAD_NS = 7 * 10**12
LINES = [
    {"schema": "x", "boot_id": "theirs", "began_ns": AHEAD_NS, "began_unix_ns": 5},
    {"t_ns": AHEAD_NS + 1, "step_us": 3.5, "running": 2},
    {"id": "a", "arrival_ns": AHEAD_NS + 2, "kv_wait_ns": [AHEAD_NS + 3, AHEAD_NS + 4]},
    {"id": "b", "intended_ns": AHEAD_NS + 5, "sent_ns": None, "end_ns": AHEAD_NS + 6},
]


def test_moments_are_ours_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "instances" / "i0"
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    for name in ("engine_step.jsonl", "engine_step.jsonl.1"):
        (folder / name).write_text(text + '{"t_ns": 12')
    (tmp_path / "gpu.csv").write_text(f"monotonic_ns,gpu\n{AHEAD_NS + 7},0\n")
    (folder / "server.log").write_text("t_ns")
    clock = Clock([Reading(0, AHEAD_NS, 0), Reading(10, AHEAD_NS, 0)])
    shift_clock(tmp_path, clock, "ours")
    for name in ("engine_step.jsonl", "engine_step.jsonl.1"):
        *whole, torn = (folder / name).read_text().split("\n")
        assert torn == '{"t_ns": 12'
        assert list(map(json.loads, whole)) == [
            {"schema": "x", "boot_id": "ours", "began_ns": 0, "began_unix_ns": 5},
            {"t_ns": 1, "step_us": 3.5, "running": 2},
            {"id": "a", "arrival_ns": 2, "kv_wait_ns": [3, 4]},
            {"id": "b", "intended_ns": 5, "sent_ns": None, "end_ns": 6},
        ]
    assert (tmp_path / "gpu.csv").read_text() == "monotonic_ns,gpu\n7,0\n"
    assert (folder / "server.log").read_text() == "t_ns"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.fixture
def before(tmp_path, monkeypatch):
    """Facts from before the start of two instances of a source, which start nothing."""
    monkeypatch.setattr(host_fleet, "launched", lambda *_, **__: nullcontext([]))
    monkeypatch.setattr(host_fleet.Workshop, "overlay", lambda *_: (tmp_path, {}))

    def facts(**source) -> Started:
        two = experiment(**({"standin": None, "instances": 2} | source))
        workshop = Workshop(tmp_path)
        part = HostFleet(two, workshop, tmp_path / "trace", tmp_path / "run")
        try:
            return part.do(Start(two.arms["a"], [0, 1], LOOPBACK))
        finally:
            part.stop()

    write_instances(
        tmp_path / "two.json", [Instance("a", "http://x"), Instance("b", "http://y")]
    )
    return facts


@pytest.fixture
def used_gpus(tmp_path, monkeypatch) -> Path:
    """Three GPUs, all in use; the folder of their profile."""
    lines = [
        H100.replace("0, ", f"{index}, ", 1).replace(" 4,", f" {used_mib},")
        for index, used_mib in enumerate((9000, 5, 8000))
    ]
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, *lines))
    text = (CONFIGS / "profiles" / "h20-30b-a3b.toml").read_text()
    on_gpus = text.replace('flavour = "cpu"', 'flavour = "gpu"')
    (tmp_path / "gpu.toml").write_text(on_gpus)
    return tmp_path


@pytest.mark.slow
def test_only_gpus_that_instances_start_on_are_looked_at(before, used_gpus):
    given_two = Given(f"{used_gpus}/two.json", ["true"])
    assert before(profile=f"{used_gpus}/gpu").gpu_used_mib == [9000, 5]
    assert before(profile="h20-30b-a3b").gpu_used_mib is None
    assert before(given=given_two).gpu_used_mib is None
    assert before(standin=[]).gpu_used_mib is None


@pytest.mark.slow
def test_a_process_that_outlived_its_run_is_seen_before_the_next(before, tmp_path):
    given_two = Given(f"{tmp_path}/two.json", ["true"])
    # Children of the process that runs the tests, such as a resource tracker.
    already = set(before(standin=[]).survivors)
    with subprocess.Popen(["sleep", "60"]) as left:
        assert set(before(standin=[]).survivors) - already == {left.pid}
        assert before(given=given_two).survivors is None
        left.kill()
