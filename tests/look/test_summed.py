# SPDX-License-Identifier: Apache-2.0
"""From records on several hosts to one table, through files."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from made_up_server import served

from lab.records import RecordsError
from look import merge, reduce
from look.cost import cost
from look.instances import read_instances
from look.summed import read_summed, summed, together


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, Path]:
    """Folders of records: two servers, and one."""
    for seed, server in enumerate(("one/a", "one/b", "two/a")):
        served(tmp_path / server, seed=seed).write()
    return {"one": tmp_path / "one", "two": tmp_path / "two"}


def test_files_of_hosts_are_merged_into_what_one_look_says(
    hosts: dict[str, Path], tmp_path: Path, capsys
) -> None:
    files = []
    for name, folder in hosts.items():
        files.append(str(tmp_path / f"{name}.parquet"))
        told = ["--out", files[-1], "--host", name]
        assert reduce.main([str(folder), *told]) == 0
    assert merge.main([*files, "--out", str(tmp_path / "all.parquet")]) == 0
    told = capsys.readouterr().out
    assert "one.parquet: vLLM 0.18.1, 800 steps of 2 servers" in told
    assert "all: vLLM 0.18.1, 1,200 steps of 3 servers" in told
    whole = read_summed(tmp_path / "all.parquet")
    assert [server.name for server in whole.servers] == ["one/a", "one/b", "two/a"]
    instances, _ = read_instances(tmp_path)
    steps = pl.concat(one.steps for one in instances)
    step = whole.counts.filter(pl.col("time") == "step_us")
    assert step["steps"].sum() == steps.height
    mean_us = step["sum_ns"].sum() / steps.height / 1e3
    assert mean_us == pytest.approx(steps["step_us"].mean(), rel=1e-6)
    assert f"{mean_us:,.1f}" in told
    for server, instance in zip(whole.servers, instances, strict=True):
        for part in cost(instance).methods:
            assert server.us[part.column] == pytest.approx(part.mean_us, abs=1e-3)
    # A file of merged files is one more file of that kind.
    assert merge.main([str(tmp_path / "all.parquet")]) == 0
    assert told.endswith(capsys.readouterr().out)


def test_in_parts_and_in_any_order_it_is_the_same(hosts: dict[str, Path]) -> None:
    one, two = (summed(folder, name) for name, folder in hosts.items())
    both, other = together([one, two]), together([two, one])
    assert both.counts.equals(other.counts)
    assert both.servers == other.servers
    nothing = together([])
    assert together([one, nothing]).counts.equals(one.counts)


def test_no_server_is_counted_twice(hosts: dict[str, Path], tmp_path: Path) -> None:
    file = str(tmp_path / "one.parquet")
    assert reduce.main([str(hosts["one"]), "--out", file, "--host", "one"]) == 0
    one = read_summed(Path(file))
    with pytest.raises(RecordsError, match="one/a, one/b would be counted twice"):
        together([one, one])
    again = tmp_path / "again.parquet"
    again.write_bytes(Path(file).read_bytes())
    assert merge.main([file, str(again)]) == 1


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1")
    assert merge.main([str(bad)]) == 1
    assert (
        "bad.parquet: not a file that python -m look.reduce" in capsys.readouterr().err
    )
    pl.DataFrame({"a": [1]}).write_parquet(bad)
    assert merge.main([str(bad)]) == 1
    assert reduce.main([str(tmp_path), "--out", str(bad)]) == 1
    assert "no engine_step.jsonl" in capsys.readouterr().err
