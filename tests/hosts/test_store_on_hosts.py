# SPDX-License-Identifier: Apache-2.0
"""What hosts have put into a store outlives the command, and counts once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.tests.simulate.two_arms import two_arms
from kvtax.hosts.store import Store
from kvtax.paths import REPOSITORY
from tests.hosts.lost_midway import files
from tests.hosts.ray_cluster import ON_CLUSTER, HeadCommand, RayCluster
from tests.hosts.s3_server import BUCKET, S3Server

pytestmark = ON_CLUSTER

COUNT, SECONDS = 30, 1.0
DEADLINE_S = 600
# The store stands in the first host's network.
S3_PORT = 5555
REFUSED_S = 60


@pytest.fixture
def two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RayCluster, S3Server]]:
    """Their environment, and the command's, name the object store."""
    server = S3Server(tmp_path, "10.77.0.1", S3_PORT)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with RayCluster(2) as cluster:
        server.start(cluster.on_head)
        try:
            command = cluster.on_head(sys.executable, "-c", MAKE_BUCKET)
            subprocess.run(command, check=True)
            yield cluster, server
        finally:
            server.stop()


MAKE_BUCKET = f"import fsspec; fsspec.filesystem('s3').mkdir('{BUCKET}')"


def running(cluster: RayCluster, log: Path, *module: str) -> HeadCommand:
    return HeadCommand(cluster, log, *module, deadline_s=DEADLINE_S)


def squares(cluster: RayCluster, url: str) -> list[str]:
    module = "tests.hosts.spread_squares"
    return [module, cluster.address, str(COUNT), str(SECONDS), url]


def all_once(found: HeadCommand) -> None:
    assert sorted(line[:2] for line in found.lines) == [
        [value, value**2] for value in range(COUNT)
    ]


def test_an_object_store_refuses_and_a_host_is_lost_and_each_piece_is_there_once(
    two_hosts: tuple[RayCluster, S3Server], tmp_path: Path
) -> None:
    cluster, server = two_hosts
    url = f"s3://{BUCKET}"
    with running(cluster, tmp_path / "log", *squares(cluster, url)) as command:
        command.wait(lambda: len(command.lines) >= 4)
        server.refuse()
        cluster.hosts[1].kill()
        time.sleep(REFUSED_S)
        assert len(command.lines) < COUNT
        server.accept()
        assert command.status() == 0, command.printed
    all_once(command)
    assert "is not in the store" not in command.printed
    listed = cluster.on_head(sys.executable, "-m", "kvtax", "store", "list", url)
    told = subprocess.run(listed, capture_output=True, text=True, cwd=REPOSITORY)
    assert told.stdout.endswith(f"{COUNT} pieces\n"), told


def test_the_first_host_is_lost_and_an_experiment_goes_on_from_the_store(
    tmp_path: Path,
) -> None:
    config = tmp_path / "two_arms.toml"
    config.write_text(two_arms([1], repeats=3))
    out, alone = tmp_path / "out" / "run", tmp_path / "alone" / "run"
    experiment = ["kvtax", "fleet", str(config), "--virtual"]
    store = Store(f"{tmp_path}/store/run")
    with RayCluster(2) as cluster:
        on_hosts = [*experiment, "--out", str(out), "--ray", cluster.address]
        on_hosts += ["--store", str(tmp_path / "store")]
        with running(cluster, tmp_path / "first", *on_hosts) as first:
            first.wait(lambda: len(store.pieces()) >= 2)
        shutil.rmtree(out)
        before = store.pieces()
        with running(cluster, tmp_path / "second", *on_hosts, "--resume") as second:
            assert second.status() == 0, second.printed
        assert before.items() <= store.pieces().items()
    command = [sys.executable, "-m", *experiment, "--out", str(alone)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=DEADLINE_S)
    assert files(out) == files(alone)
