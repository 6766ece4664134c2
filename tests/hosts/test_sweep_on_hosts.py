# SPDX-License-Identifier: Apache-2.0
"""A sweep over hosts: each repeat is made whole on one of them, whatever is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtax.records.files import read_document
from kvtax.records.per_config import PerConfig
from kvtax.records.run import PLAN_FILE, RunRecord
from tests.hosts.ray_cluster import ON_CLUSTER, HeadCommand, RayCluster

pytestmark = ON_CLUSTER

CONFIGS, REPEATS = ["plain", "noop"], 3
DEADLINE_S = 900
# Ray notices, the agent ends, its supervisor stops the server.
GONE_S = 90


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


def sweep(cluster: RayCluster, out: Path, *more: str, ray: bool = True) -> HeadCommand:
    """A sweep on the hosts of `cluster`, or on the first alone."""
    command = ["kvtax", "sweep", "--profile", "cpu-smoke"]
    for config in CONFIGS:
        command += ["--only", config]
    command += ["--repeats", str(REPEATS), "--out", str(out), *more]
    command += ["--ray", cluster.address] if ray else []
    return HeadCommand(cluster, out.with_name("log"), *command, deadline_s=DEADLINE_S)


def test_a_host_is_lost_and_each_repeat_is_there_once_and_whole(
    cluster: RayCluster, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    lost = cluster.hosts[1]
    with sweep(cluster, out) as found:
        found.wait(lambda: bool(lost.processes("microbench.driver")))
        lost.kill()
        status = found.status()
    assert f"given up {lost.address}" in found.printed
    run = read_document(out / PLAN_FILE, RunRecord)
    (host,) = run.hosts
    assert host.host == cluster.hosts[0].address
    assert sorted(host.repeats) == list(range(REPEATS))
    document = read_document(out / "per_config.json", PerConfig)
    (entry,) = document.hosts.values()
    # How many of them count is the analysis' business: this machine may be slow.
    assert entry.servers == len(CONFIGS) * REPEATS
    for repeat in range(REPEATS):
        assert f"repeat {repeat} on {host.host}: 2 of 2 ok" in found.printed
    assert set(entry.p50_us) == set(CONFIGS)
    assert "## Hosts" in (out / "SUMMARY.md").read_text()
    assert status == 0, found.printed


def test_the_command_is_killed_and_no_server_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RayCluster(1) as cluster:
        (host,) = cluster.hosts
        with sweep(cluster, out) as found:
            found.wait(lambda: bool(host.processes("microbench.driver")))
        cluster.nothing_stays("microbench", "vllm", within_s=GONE_S)
        assert read_document(out / PLAN_FILE, RunRecord).hosts == []
        with sweep(cluster, out, "--resume", ray=False) as alone:
            assert alone.status() == 2
    assert "it was begun with --ray" in alone.printed


def test_a_second_sweep_is_refused_by_the_host_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with RayCluster(1) as cluster:
        (host,) = cluster.hosts
        with sweep(cluster, tmp_path / "first" / "run") as first:
            first.wait(lambda: bool(host.processes("microbench.driver")))
            out = tmp_path / "second" / "run"
            with sweep(cluster, out, "--repeats", "1") as second:
                assert second.status() == 3
            assert first.status() == 0, first.printed
    busy = f"{host.address}: another sweep or experiment is running"
    assert f"given up {busy}" in second.printed
    assert f"no host for 60 s: {busy}" in second.printed


def test_a_host_whose_workers_yield_to_others_is_not_measured_on(
    tmp_path: Path,
) -> None:
    with (
        RayCluster(1, niceness=15) as cluster,
        sweep(cluster, tmp_path / "run") as found,
    ):
        assert found.status() == 3
    assert "10.77.0.1: Ray's workers run at niceness 15" in found.printed
    assert "RAY_worker_niceness=0" in found.printed
