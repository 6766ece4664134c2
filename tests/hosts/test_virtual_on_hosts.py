# SPDX-License-Identifier: Apache-2.0
"""An experiment in virtual time over hosts: the bytes of one host, whatever is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_cluster import RayCluster

from lab.paths import REPOSITORY
from tests.fleet.virtual.two_arms import two_arms

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


def command(config: Path, out: Path, *more: str) -> list[str]:
    module = [sys.executable, "-m", "fleet.experiment", str(config), "--virtual"]
    return [*module, "--out", str(out), *more]


@pytest.fixture(scope="module")
def on_one_host(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    subprocess.run(command(config, out), cwd=REPOSITORY, check=True, timeout=DEADLINE_S)
    return out


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as cluster:
        yield cluster


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run; its page names the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(
            str(folder).encode(), b"RUN"
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def made(out: Path) -> int:
    return len(list(out.glob("*/r*/arm.json")))


def wait(process: subprocess.Popen, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_host_is_lost_and_one_comes_and_the_bytes_are_those_of_one_host(
    cluster: RayCluster, config: Path, on_one_host: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = cluster.on_head(*command(config, out, "--ray", cluster.address))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(run, cwd=REPOSITORY, stdout=log, stderr=log)
        try:
            wait(process, lambda: made(out) >= 2)
            cluster.hosts[1].kill()
            cluster.add()
            status = process.wait(DEADLINE_S)
        finally:
            process.kill()
    told = (tmp_path / "log").read_text()
    assert status == 0, told
    assert f"given up {cluster.hosts[1].address}" in told
    assert files(out) == files(on_one_host)
