# SPDX-License-Identifier: Apache-2.0
"""A run over several hosts says of each what it measured; one on one host does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtax.engine.connector import load_connector
from kvtax.hosts import work
from kvtax.hosts.store import Store, store_of_run
from kvtax.records.files import read_document, write_document
from kvtax.records.per_config import PerConfig
from kvtax.records.run import PLAN_FILE, HostRecord, RunRecord, TrialRecord
from microbench.on_hosts import PROVENANCE, Round, note, run_on_hosts
from microbench.profile import load_profile
from microbench.report import report
from microbench.trial import PlannedTrial
from tests.microbench.synthetic import Truth, page_of, write_run

SLOWER_US = 40.0


def host(name: str, *repeats: int) -> HostRecord:
    return HostRecord(name, list(repeats), {"cpu_model": f"CPU of {name}"})


@pytest.mark.slow
def test_each_host_has_the_levels_of_its_own_repeats(tmp_path: Path) -> None:
    offsets = (0.0, SLOWER_US, 0.0, SLOWER_US)
    configs = [Truth("plain", repeat_offsets=offsets), Truth("noop", fails="broken")]
    write_run(tmp_path, configs, repeats=4, hosts=[host("a", 0, 2), host("b", 3, 1)])
    report(tmp_path, tmp_path)
    found = read_document(tmp_path / "per_config.json", PerConfig).hosts
    assert list(found) == ["a", "b"]
    assert found["b"].repeats == [1, 3]
    assert found["b"].cpu_model == "CPU of b"
    assert found["a"].send_lag_p99_ms == 0.5
    assert (found["a"].servers, found["a"].servers_that_count) == (4, 2)
    levels = {name: one.p50_us["plain"]["schedule"] for name, one in found.items()}
    assert levels["b"] - levels["a"] == pytest.approx(SLOWER_US, rel=0.1)
    assert "| b | CPU of b | 1, 3 | 4 | 2 |" in (tmp_path / "SUMMARY.md").read_text()
    assert len(page_of(tmp_path)["by_title"]["Hosts"]["rows"]) == 2


@pytest.mark.slow
def test_a_run_on_one_machine_has_no_table_of_hosts(tmp_path: Path) -> None:
    write_run(tmp_path, [Truth("plain")])
    report(tmp_path, tmp_path)
    assert read_document(tmp_path / "per_config.json", PerConfig).hosts is None
    assert "## Hosts" not in (tmp_path / "SUMMARY.md").read_text()
    assert "Hosts" not in page_of(tmp_path)["by_title"]


def test_a_repeat_that_is_made_again_belongs_to_who_made_it_last() -> None:
    run = RunRecord(hosts=[])
    for name, repeat in (("a", 0), ("b", 1), ("a", 2), ("b", 0)):
        note(run, name, repeat, {})
    assert {one.host: one.repeats for one in run.hosts} == {"a": [2], "b": [1, 0]}


PLAIN = load_connector("plain")
PLAN = [PlannedTrial("plain", repeat, PLAIN, {}) for repeat in range(3)]


def measured(folder: Path, planned: PlannedTrial, status: str) -> None:
    """The repeat of one config, as its host leaves it."""
    (folder / planned.folder).mkdir(parents=True)
    record = TrialRecord(
        config=planned.config,
        repeat=planned.repeat,
        status=status,
        num_blocks=1,
        block_size=16,
    )
    write_document(folder / planned.folder / "trial.json", record)
    (folder / PROVENANCE).write_text('{"cpu_model": "theirs"}')


@pytest.mark.slow
def test_what_the_store_has_is_in_the_run_and_only_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = []

    def spread(
        address, module, files, tasks, alone, place, progress
    ) -> Iterator[tuple]:
        """Measures each on the host b, which puts it into the store."""
        for number, task in enumerate(tasks):
            repeat = msgspec.json.decode(task, type=Round).repeat
            works.append(repeat)
            into = place(number, "b")
            made = tmp_path / f"b{len(works)}"
            measured(made, PLAN[repeat], "ok")
            yield number, "b", Store(into.url).put(into.name, made, into.work, "b")

    monkeypatch.setattr(work, "spread", spread)
    profile = msgspec.to_builtins(load_profile("cpu-smoke"))

    def run(folder: Path, resume: bool) -> RunRecord:
        folder.mkdir()
        record = RunRecord(
            profile=profile, provenance={"package_versions": {}}, hosts=[]
        )
        store = store_of_run(str(tmp_path / "store"), "run", resume)
        trials = run_on_hosts(
            "nowhere:1", None, None, store, folder, record, PLAN, resume
        )
        assert [trial.repeat for trial in trials] == [0, 1, 2]
        assert {trial.status for trial in trials} == {"ok"}
        assert {one.name for one in folder.iterdir()} == {"plain", PLAN_FILE}
        return read_document(folder / PLAN_FILE, RunRecord)

    first = run(tmp_path / "first", resume=False)
    assert works == [0, 1, 2]
    # Of another head: repeat 1 went wrong on host a, and is measured again.
    store = Store(str(tmp_path / "store" / "run"))
    sha256 = store.pieces()["r1"].work
    measured(tmp_path / "a1", PLAN[1], "failed")
    store.put("r1", tmp_path / "a1", sha256, "a")
    second = run(tmp_path / "second", resume=True)
    assert works == [0, 1, 2, 1]
    for found in (first, second):
        assert [(one.host, sorted(one.repeats)) for one in found.hosts] == [
            ("b", [0, 1, 2])
        ]
        assert found.hosts[0].provenance == {"cpu_model": "theirs"}
