# SPDX-License-Identifier: Apache-2.0
"""Instances that somebody else started, made fresh by a `restart` command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from small_experiment import experiment

from fleet.experiment import fleets
from fleet.experiment.arm import RUN_ERRORS
from fleet.experiment.config import (
    Arm,
    Given,
)
from fleet.experiment.fleets import fresh_fleet
from fleet.instances import InstancesError, write_instances
from lab.records.instances import Instance


def restarted(*command: str, instances: int = 1, file: Path = Path("none")) -> None:
    given_there = Given(str(file), list(command))
    elsewhere = experiment(standin=None, given=given_there, instances=instances)
    with fresh_fleet(elsewhere, Arm("linear"), None, Path()):
        pass


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
