# SPDX-License-Identifier: Apache-2.0
"""Fleets: restarted instances, evidence from before the start."""

from __future__ import annotations

import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from fleet.tests.experiment.small_experiment import experiment
from tests.fake_gpu import H100, path_with_gpus

from kvtax_fleet.experiment import fleet as fleet_module
from kvtax_fleet.experiment.arm_run import RUN_ERRORS
from kvtax_fleet.experiment.config import Arm, Given
from kvtax_fleet.experiment.fleet import Fleet
from kvtax_fleet.instances import InstancesError, write_instances
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.instances import Instance


def restarted(*command: str, instances: int = 1, file: Path = Path("none")) -> None:
    given_there = Given(str(file), list(command))
    elsewhere = experiment(given=given_there, instances=instances)
    with Fleet(elsewhere, Workshop(Path()), Path("no-folder")) as fleet:
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
    monkeypatch.setattr(fleet_module, "READY_DEADLINE_S", 1.0)
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


@pytest.fixture
def before(tmp_path, monkeypatch):
    """Facts from before the start of two instances of a source, which start nothing."""
    monkeypatch.setattr(fleet_module, "launched", lambda *_, **__: nullcontext([]))
    monkeypatch.setattr(fleet_module.Workshop, "overlay", lambda *_: (tmp_path, {}))

    def facts(**source) -> Fleet:
        two = experiment(**({"given": None, "instances": 2} | source))
        with Fleet(two, Workshop(tmp_path), tmp_path / "run") as fleet:
            fleet.start(two.arms["a"])
            return fleet

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


@pytest.mark.slow
def test_a_process_that_outlived_its_run_is_seen_before_the_next(before, tmp_path):
    given_two = Given(f"{tmp_path}/two.json", ["true"])
    # Children of the process that runs the tests, such as a resource tracker.
    already = set(before(profile="h20-30b-a3b").survivors)
    with subprocess.Popen(["sleep", "60"]) as left:
        assert set(before(profile="h20-30b-a3b").survivors) - already == {left.pid}
        assert before(given=given_two).survivors is None
        left.kill()
