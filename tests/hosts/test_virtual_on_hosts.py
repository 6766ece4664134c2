# SPDX-License-Identifier: Apache-2.0
"""An experiment in virtual time over hosts: the bytes of one host, whatever is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.tests.simulate.two_arms import two_arms
from kvtax.paths import REPOSITORY
from tests.hosts.lost_midway import LOST, command, differences, files, made, over_hosts
from tests.hosts.ray_cluster import ON_CLUSTER, HeadCommand, RayCluster

pytestmark = ON_CLUSTER

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
    alone = [sys.executable, "-m", *command(config, out)]
    subprocess.run(alone, cwd=REPOSITORY, check=True, timeout=DEADLINE_S)
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
    with RayCluster(2) as cluster:
        module = command(config, out, "--ray", cluster.address)
        with HeadCommand(cluster, log, *module, deadline_s=DEADLINE_S) as lost:
            lost.wait(lambda: made(out) >= 2)
            cluster.hosts[0].kill()
            assert lost.status() == 3, lost.printed
        assert "the Ray cluster is lost" in lost.printed
        done = made(out)
    with RayCluster(1) as cluster:
        module = command(config, out, "--resume", "--ray", cluster.address)
        with HeadCommand(cluster, log, *module, deadline_s=DEADLINE_S) as resumed:
            assert resumed.status() == 0, resumed.printed
    assert f"{cluster.hosts[0].address}: {RUNS - done} done" in resumed.printed
    assert differences(files(out), files(on_one_host)) == []
