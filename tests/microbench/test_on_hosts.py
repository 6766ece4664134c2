# SPDX-License-Identifier: Apache-2.0
"""A run over several hosts says of each what it measured; one on one host does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtax.records.files import read_document
from kvtax.records.per_config import PerConfig
from kvtax.records.run import HostRecord, RunRecord
from microbench.on_hosts import note
from microbench.report import report
from tests.microbench.synthetic import PROFILE, Truth, page_of, write_run

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
    run = RunRecord(profile=PROFILE, hosts=[])
    for name, repeat in (("a", 0), ("b", 1), ("a", 2), ("b", 0)):
        note(run, name, repeat, {})
    assert {one.host: one.repeats for one in run.hosts} == {"a": [2], "b": [1, 0]}
