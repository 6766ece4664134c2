# SPDX-License-Identifier: Apache-2.0
"""What hosts have put into a store outlives the command, and counts once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_cluster import RayCluster

from lab.paths import REPOSITORY
from lab.store.store import Store
from tests.fleet.virtual.two_arms import two_arms
from tests.lab.s3_server import BUCKET, S3Server

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own need root"),
]

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


class Command:
    """A command on the first host, and what it has printed."""

    def __init__(self, cluster: RayCluster, log: Path, *module: str) -> None:
        self._log = log
        self._errors = log.with_suffix(".err")
        with log.open("wb") as out, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                cluster.on_head(sys.executable, "-m", *module),
                cwd=REPOSITORY,
                stdout=out,
                stderr=errors,
            )

    @property
    def lines(self) -> list[list]:
        whole = self._log.read_text().rpartition("\n")[0].splitlines()
        # Ray itself prints that a node is lost.
        return [json.loads(line) for line in whole if line.startswith("[")]

    @property
    def told(self) -> str:
        return self._log.read_text() + self._errors.read_text()

    def wait(self, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not until():
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline_s, self.told
            time.sleep(0.05)


@contextmanager
def running(cluster: RayCluster, log: Path, *module: str) -> Iterator[Command]:
    command = Command(cluster, log, *module)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


def squares(cluster: RayCluster, url: str) -> list[str]:
    module = "tests.hosts.stored_squares"
    return [module, cluster.address, str(COUNT), str(SECONDS), url]


def all_once(found: Command) -> None:
    assert sorted(line[:2] for line in found.lines) == [
        [value, value**2] for value in range(COUNT)
    ]


def test_what_was_done_before_the_command_was_lost_is_not_done_again(
    tmp_path: Path,
) -> None:
    store = Store(f"{tmp_path}/store/run")
    with RayCluster(2) as cluster:
        module = squares(cluster, str(tmp_path / "store"))
        with running(cluster, tmp_path / "first", *module) as first:
            first.wait(lambda: len(first.lines) >= 4)
        before = store.pieces()
        assert 4 <= len(before) < COUNT
        with running(cluster, tmp_path / "second", *module) as second:
            assert second.process.wait(DEADLINE_S) == 0, second.told
    all_once(second)
    after = store.pieces()
    assert len(after) == COUNT
    assert before.items() <= after.items()


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
        assert command.process.wait(DEADLINE_S) == 0, command.told
    all_once(command)
    assert "is not in the store" not in command.told
    listed = cluster.on_head(sys.executable, "-m", "lab.store", "list", url)
    told = subprocess.run(listed, capture_output=True, text=True, cwd=REPOSITORY)
    assert told.stdout.endswith(f"{COUNT} pieces\n"), told


def test_the_first_host_is_lost_and_an_experiment_goes_on_from_the_store(
    tmp_path: Path,
) -> None:
    config = tmp_path / "two_arms.toml"
    config.write_text(two_arms([1], repeats=3))
    out, alone = tmp_path / "out" / "run", tmp_path / "alone" / "run"
    experiment = ["fleet.experiment", str(config), "--virtual"]
    store = Store(f"{tmp_path}/store/run")
    with RayCluster(2) as cluster:
        on_hosts = [*experiment, "--out", str(out), "--ray", cluster.address]
        on_hosts += ["--store", str(tmp_path / "store")]
        with running(cluster, tmp_path / "first", *on_hosts) as first:
            first.wait(lambda: len(store.pieces()) >= 2)
        shutil.rmtree(out)
        before = store.pieces()
        with running(cluster, tmp_path / "second", *on_hosts, "--resume") as second:
            assert second.process.wait(DEADLINE_S) == 0, second.told
        assert before.items() <= store.pieces().items()
    command = [sys.executable, "-m", *experiment, "--out", str(alone)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=DEADLINE_S)
    assert files(out) == files(alone)


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run; its page names the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(
            str(folder).encode(), b"RUN"
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
