# SPDX-License-Identifier: Apache-2.0
"""A store has a copy of each run; what goes wrong with it costs no run."""

from __future__ import annotations

import pytest
from small_experiment import experiment

from fleet.experiment import stored
from fleet.experiment.arm import ExperimentContext
from fleet.experiment.plan import plan
from lab.store import store as store_module
from lab.store.store import store_of_run


def test_a_run_that_the_store_refuses_is_in_its_folder_and_that_is_said(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(store_module, "PATIENCE_S", 0)
    monkeypatch.setattr(stored, "finished", lambda folder: True)
    (tmp_path / "trace").touch()
    context = ExperimentContext(experiment(repeats=1), tmp_path / "trace", None)
    runs = [(run, None) for run in plan(context.experiment)]
    store = store_of_run(str(tmp_path / "store"), "run", resume=False)
    # A file where the folder of an arm has to be.
    (tmp_path / "store" / "run" / runs[0][0].label).touch()

    def make(context, runs, out):
        for run, _ in runs:
            (out / run.folder).mkdir(parents=True)
            yield out / run.folder

    made = list(stored.make_or_fetch(make, store, None, context, runs, tmp_path))
    assert made == [tmp_path / run.folder for run, _ in runs]
    assert set(store.pieces()) == {run.folder for run, _ in runs[1:]}
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{runs[0][0].folder} is in" in told
    assert "not in the store" in told


@pytest.mark.parametrize("hosts", [1, 3])
def test_runs_on_another_number_of_hosts_are_not_mixed(tmp_path, monkeypatch, hosts):
    monkeypatch.setattr(stored, "finished", lambda folder: True)
    (tmp_path / "trace").touch()
    context = ExperimentContext(experiment(repeats=1), tmp_path / "trace", None)
    runs = [(run, None) for run in plan(context.experiment)]

    def make(context, runs, out):
        (tmp_path / "made").mkdir()
        yield tmp_path / "made"

    store = store_of_run(str(tmp_path / "store"), "run", resume=False)
    list(stored.make_or_fetch(make, store, 2, context, runs, tmp_path))
    resumed = store_of_run(str(tmp_path / "store"), "run", resume=True)
    with pytest.raises(stored.StoreError, match="give another --out"):
        list(stored.make_or_fetch(make, resumed, hosts, context, runs, tmp_path))
