# SPDX-License-Identifier: Apache-2.0
"""Fleets: evidence from before the start."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from fleet.tests.experiment.small_experiment import experiment
from tests.fake_gpu import H100, path_with_gpus

from kvtax_fleet.experiment import fleet as fleet_module
from kvtax_fleet.experiment.fleet import Fleet
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.paths import CONFIGS


@pytest.fixture
def before(tmp_path, monkeypatch):
    """Facts from before the start of two instances of a source, which start nothing."""
    monkeypatch.setattr(fleet_module, "launched", lambda *_, **__: nullcontext([]))
    monkeypatch.setattr(fleet_module.Workshop, "overlay", lambda *_: (tmp_path, {}))

    def facts(**source) -> Fleet:
        two = experiment(instances=2, **source)
        with Fleet(two, Workshop(tmp_path), tmp_path / "run") as fleet:
            fleet.start(two.arms["a"])
            return fleet

    return facts


@pytest.fixture
def used_gpus(tmp_path, monkeypatch) -> Path:
    """Three GPUs, all in use; the folder of their profile."""
    lines = [
        H100.replace("0, ", f"{index}, ", 1).replace(", 4", f", {used_mib}")
        for index, used_mib in enumerate((9000, 5, 8000))
    ]
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, *lines))
    text = (CONFIGS / "profiles" / "h20-30b-a3b.toml").read_text()
    on_gpus = text.replace('flavour = "cpu"', 'flavour = "gpu"')
    (tmp_path / "gpu.toml").write_text(on_gpus)
    return tmp_path


@pytest.mark.slow
def test_only_gpus_that_instances_start_on_are_looked_at(before, used_gpus):
    assert before(profile=f"{used_gpus}/gpu").gpu_used_mib == [9000, 5]
    assert before(profile="h20-30b-a3b").gpu_used_mib is None


@pytest.mark.slow
def test_a_process_that_outlived_its_run_is_seen_before_the_next(before, tmp_path):
    # Children of the process that runs the tests, such as a resource tracker.
    already = set(before(profile="h20-30b-a3b").survivors)
    with subprocess.Popen(["sleep", "60"]) as left:
        assert set(before(profile="h20-30b-a3b").survivors) - already == {left.pid}
        left.kill()
