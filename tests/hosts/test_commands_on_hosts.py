# SPDX-License-Identifier: Apache-2.0
"""The sweep, the observatory and virtual experiments on two hosts, as on one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.tests.simulate.two_arms import two_arms
from kvtax.engine.provenance import git_commit
from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import read_cells
from kvtax.records.per_config import PerConfig
from kvtax.records.run import PLAN_FILE, RunRecord
from tests.hosts.ray_cluster import HeadCommand, RayCluster, on_cluster

DEADLINE_S = 900
CLEAN_S = 60


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


def kvtax(cluster: RayCluster, log: Path, *arguments: str) -> HeadCommand:
    command = ["kvtax", *arguments, "--ray", cluster.address]
    return HeadCommand(cluster, log, *command, deadline_s=DEADLINE_S)


@on_cluster
def test_a_sweep_loses_a_host_and_each_repeat_is_there_once_and_whole(
    cluster: RayCluster, tmp_path: Path
) -> None:
    out, lost = tmp_path / "run", cluster.hosts[1]
    configs = ["--only", "plain", "--only", "noop", "--repeats", "3"]
    command = ["sweep", "--profile", "cpu-smoke", *configs, "--out", str(out)]
    with kvtax(cluster, tmp_path / "log", *command) as sweep:
        sweep.wait(lambda: bool(lost.processes("microbench.driver")))
        lost.kill()
        status = sweep.status()
    assert status == 0, sweep.printed
    assert f"lost {lost.address}" in sweep.printed
    (host,) = read_document(out / PLAN_FILE, RunRecord).hosts
    assert host.host == cluster.hosts[0].address
    assert sorted(host.repeats) == [0, 1, 2]
    assert host.provenance["git_commit"] == git_commit()
    (entry,) = read_document(out / "per_config.json", PerConfig).hosts.values()
    assert entry.servers == 6
    assert set(entry.p50_us) == {"plain", "noop"}
    assert "## Hosts" in (out / "SUMMARY.md").read_text()
    cluster.nothing_stays("microbench", "vllm", within_s=CLEAN_S)


@on_cluster
def test_a_sweep_is_killed_and_no_server_stays(
    cluster: RayCluster, tmp_path: Path
) -> None:
    command = ["sweep", "--profile", "cpu-smoke", "--only", "plain", "--repeats", "2"]
    out = ["--out", str(tmp_path / "run")]
    with kvtax(cluster, tmp_path / "log", *command, *out) as sweep:
        sweep.wait(lambda: bool(cluster.hosts[1].processes("microbench.driver")))
        sweep.process.kill()
        sweep.status()
    cluster.nothing_stays("microbench", "vllm", within_s=CLEAN_S)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this one, as the observatory writes into its own."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True)
    copy = tmp_path / "checkout"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    (copy / ".venv").symlink_to(REPOSITORY / ".venv")
    return copy


@on_cluster
def test_two_cells_are_measured_by_two_hosts_and_the_page_says_so(
    cluster: RayCluster, checkout: Path
) -> None:
    release, connectors = "0.18.1", ["noop", "plain"]
    command = [sys.executable, "-m", "kvtax", "axes", "--release", release, "--again"]
    for connector in connectors:
        command += ["--connector", connector]
    done = subprocess.run(
        cluster.on_head(*command, "--ray", cluster.address),
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = checkout / "studies" / "observatory"
    kept = read_cells(results / f"{release}.jsonl.xz")
    cells = [cell for cell in kept if cell.connector in connectors]
    assert [cell.error for cell in cells] == [None, None]
    hosts = {host.address for host in cluster.hosts}
    assert {cell.host for cell in cells} == hosts
    page = (results / "README.md").read_text()
    assert all(f"| {host} |" in page for host in hosts)
    cluster.nothing_stays("kvtax.axes", within_s=CLEAN_S)


@on_cluster
def test_an_experiment_loses_a_host_and_its_bytes_are_those_of_one_host(
    cluster: RayCluster, tmp_path: Path
) -> None:
    config, lost = tmp_path / "two_arms.toml", cluster.hosts[1]
    config.write_text(two_arms([1, 2], repeats=4))
    command = ["fleet", str(config), "--virtual", "--out"]
    here, there = tmp_path / "here", tmp_path / "there"
    alone = [sys.executable, "-m", "kvtax", *command, str(here)]
    subprocess.run(alone, cwd=REPOSITORY, check=True, timeout=DEADLINE_S)
    with kvtax(cluster, tmp_path / "log", *command, str(there)) as experiment:
        experiment.wait(lambda: bool(list(there.glob("*/r*/arm.json"))))
        lost.kill()
        assert experiment.status() == 0, experiment.printed
    assert f"lost {lost.address}" in experiment.printed
    assert files(there) == files(here)


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run; its page names the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(
            str(folder).encode(), b"RUN"
        )
        for path in folder.rglob("*")
        if path.is_file()
    }
