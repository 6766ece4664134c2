# SPDX-License-Identifier: Apache-2.0
"""A store has a copy of each run; what goes wrong with it costs no run."""

from __future__ import annotations

import pytest

from kvtax.fleet.experiment.executors import Stored
from kvtax.fleet.experiment.experiment_plan import ExperimentError, PlannedRun, plan
from kvtax.hosts import store as store_module
from kvtax.hosts.store import store_of_run
from tests.fleet.experiment.small_experiment import experiment


class Made:
    """An executor that makes empty folders."""

    def run(self, runs):
        for run in runs:
            run.folder.mkdir(parents=True)
            yield run


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[PlannedRun]:
    monkeypatch.setattr(PlannedRun, "is_finished", True)
    (tmp_path / "trace").touch()
    planned = plan(experiment(repeats=1))
    return [PlannedRun(run, None, tmp_path / run.name) for run in planned]


def make(tmp_path, store, runs, hosts=None) -> list[PlannedRun]:
    trace = tmp_path / "trace"
    return list(Stored(Made(), store, experiment(repeats=1), trace, hosts).run(runs))


def test_a_run_that_the_store_refuses_is_in_its_folder_and_reported(
    tmp_path, monkeypatch, capsys, runs
):
    monkeypatch.setattr(store_module, "PATIENCE_S", 0)
    store = store_of_run(str(tmp_path / "store"), "run", resume=False)
    # A file where the folder of an arm has to be.
    (tmp_path / "store" / "run" / runs[0].run.label).touch()
    assert make(tmp_path, store, runs) == runs
    assert set(store.pieces()) == {run.run.name for run in runs[1:]}
    (told,) = capsys.readouterr().err.splitlines()
    assert runs[0].run.name in told


@pytest.mark.parametrize("hosts", [1, 3])
def test_runs_on_another_number_of_hosts_are_not_mixed(tmp_path, runs, hosts):
    store = store_of_run(str(tmp_path / "store"), "run", resume=False)
    make(tmp_path, store, runs[:1], hosts=2)
    resumed = store_of_run(str(tmp_path / "store"), "run", resume=True)
    with pytest.raises(ExperimentError):
        make(tmp_path, resumed, runs, hosts=hosts)
