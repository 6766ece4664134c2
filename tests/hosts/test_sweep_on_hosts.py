# SPDX-License-Identifier: Apache-2.0
"""A sweep over hosts: each repeat is made whole on one of them, whatever is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from lab.records.documents import read_document
from lab.records.per_config import PerConfig
from lab.records.run import PLAN_FILE, RunRecord
from tests.hosts.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own need root"),
]

CONFIGS, REPEATS = ["plain", "noop"], 3
DEADLINE_S = 900
# Ray notices, the agent ends, its supervisor stops the server.
GONE_S = 90


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


class Sweep:
    """A sweep on the hosts of `cluster`, or on the first alone."""

    def __init__(
        self, cluster: RayCluster, out: Path, *more: str, ray: bool = True
    ) -> None:
        command = [sys.executable, "-m", "microbench.sweep", "--profile", "cpu-smoke"]
        for config in CONFIGS:
            command += ["--only", config]
        command += ["--repeats", str(REPEATS), "--out", str(out), *more]
        command += ["--ray", cluster.address] if ray else []
        command = cluster.on_head(*command)
        self._log = out.with_name("log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=log, stderr=log
            )

    @property
    def told(self) -> str:
        return self._log.read_text()

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline, self.told
            time.sleep(0.1)


def test_a_host_is_lost_and_each_repeat_is_there_once_and_whole(
    cluster: RayCluster, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sweep = Sweep(cluster, out)
    lost = cluster.hosts[1]
    try:
        sweep.wait(lambda: bool(lost.processes("microbench.driver")))
        lost.kill()
        sweep.process.wait(DEADLINE_S)
    finally:
        sweep.process.kill()
    assert f"given up {lost.address}" in sweep.told
    run = read_document(out / PLAN_FILE, RunRecord)
    (host,) = run.hosts
    assert host.host == cluster.hosts[0].address
    assert sorted(host.repeats) == list(range(REPEATS))
    found = read_document(out / "per_config.json", PerConfig)
    (entry,) = found.hosts.values()
    # How many of them count is the analysis' business: this machine may be slow.
    assert entry.servers == len(CONFIGS) * REPEATS
    for repeat in range(REPEATS):
        assert f"repeat {repeat} on {host.host}: 2 of 2 ok" in sweep.told
    assert set(entry.p50_us) == set(CONFIGS)
    assert "## Hosts" in (out / "SUMMARY.md").read_text()
    assert sweep.process.returncode == 0, sweep.told


def test_the_command_is_killed_and_no_server_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RayCluster(1) as cluster:
        (host,) = cluster.hosts
        sweep = Sweep(cluster, out)
        try:
            sweep.wait(lambda: bool(host.processes("microbench.driver")))
        finally:
            sweep.process.kill()
        deadline = time.monotonic() + GONE_S
        while left := host.processes("microbench") + host.processes("vllm"):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert read_document(out / PLAN_FILE, RunRecord).hosts == []
        alone = Sweep(cluster, out, "--resume", ray=False)
        assert alone.process.wait(DEADLINE_S) == 1
    assert "it was begun with --ray" in alone.told


def test_a_second_sweep_is_refused_by_the_host_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with RayCluster(1) as cluster:
        (host,) = cluster.hosts
        first = Sweep(cluster, tmp_path / "first" / "run")
        try:
            first.wait(lambda: bool(host.processes("microbench.driver")))
            second = Sweep(cluster, tmp_path / "second" / "run", "--repeats", "1")
            try:
                assert second.process.wait(DEADLINE_S) == 1
            finally:
                second.process.kill()
            assert first.process.wait(DEADLINE_S) == 0, first.told
        finally:
            first.process.kill()
    busy = f"{host.address}: another sweep or experiment is running"
    assert f"given up {busy}" in second.told
    assert f"no host for 60 s: {busy}" in second.told


def test_a_host_whose_workers_yield_to_others_is_not_measured_on(
    tmp_path: Path,
) -> None:
    with RayCluster(1, niceness=15) as cluster:
        sweep = Sweep(cluster, tmp_path / "run")
        try:
            status = sweep.process.wait(DEADLINE_S)
        finally:
            sweep.process.kill()
    assert status == 1
    assert "10.77.0.1: Ray's workers run at niceness 15" in sweep.told
    assert "RAY_worker_niceness=0" in sweep.told
