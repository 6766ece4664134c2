# SPDX-License-Identifier: Apache-2.0
"""An experiment in virtual time over hosts: the bytes of one host, whatever is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from tests.fleet.virtual.two_arms import two_arms
from tests.hosts.lost_midway import (
    LOST,
    command,
    differences,
    files,
    made,
    over_hosts,
    wait,
)
from tests.hosts.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own need root"),
]

RUNS = 16
DEADLINE_S = 300


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "two_arms.toml"
    path.write_text(two_arms([1, 2], repeats=4))
    return path


@pytest.fixture(scope="module")
def on_one_host(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    subprocess.run(command(config, out), cwd=REPOSITORY, check=True, timeout=DEADLINE_S)
    return out


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as cluster:
        yield cluster


def test_a_host_is_lost_and_one_comes_and_the_bytes_are_those_of_one_host(
    cluster: RayCluster, config: Path, on_one_host: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    told, _ = over_hosts(cluster, config, out, 2, DEADLINE_S)
    assert f"given up {cluster.hosts[LOST].address}" in told
    assert differences(files(out), files(on_one_host)) == []


def test_the_first_host_is_lost_and_another_cluster_does_the_rest(
    config: Path, on_one_host: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with RayCluster(2) as cluster, log.open("wb") as told:
        run = cluster.on_head(*command(config, out, "--ray", cluster.address))
        process = subprocess.Popen(run, cwd=REPOSITORY, stdout=told, stderr=told)
        try:
            wait(process, lambda: made(out) >= 2, DEADLINE_S)
            cluster.hosts[0].kill()
            assert process.wait(DEADLINE_S) == 2, log.read_text()
        finally:
            process.kill()
        assert "the Ray cluster is lost" in log.read_text()
        done = made(out)
    with RayCluster(1) as cluster:
        more = command(config, out, "--resume", "--ray", cluster.address)
        resumed = subprocess.run(
            cluster.on_head(*more), cwd=REPOSITORY, capture_output=True, text=True
        )
    assert resumed.returncode == 0, resumed.stderr
    assert f"{cluster.hosts[0].address}: {RUNS - done} done" in resumed.stderr
    assert differences(files(out), files(on_one_host)) == []
