# SPDX-License-Identifier: Apache-2.0
"""Fleets in real time over hosts: they end as on one host, and no loss counts twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kvtax_fleet.analyze.arm_runs import ArmRun, read_run

from kvtax.hosts.store import Store
from kvtax.records.life import only_life
from tests.hosts.ray_cluster import ON_CLUSTER, HeadCommand, Host, RayCluster

pytestmark = ON_CLUSTER

# Stand-ins that take their time, so that a run lasts long enough to be disturbed.
STANDINS = """
summary = "stand-ins over hosts"
standin = ["--step-us", "{step_us}"]
instances = 2
concurrency = [2]
repeats = {repeats}
replayers = {replayers}
baseline = "linear"
lag_budget_ms = 1000

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
sessions = 10
max_turns = 3
max_output_tokens = 8
max_think_s = 0

[arms.linear]
policy = "linear"
"""
# One instance prefills and the other decodes: KV goes from host to host.
REAL = """
summary = "prefill on one host, decode on the other"
profile = "h20-30b-a3b"
instances = 2
concurrency = [2]
repeats = 1
baseline = "pools"
lag_budget_ms = 10000

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
sessions = 4
max_turns = 2
max_output_tokens = 8
max_think_s = 0

[arms.pools]
policy = "pd_sep"
connector = "mooncake_both_fixed"
roles = ["prefill", "decode"]
"""
# By so much the clocks of other hosts are ahead.
AHEAD_S = 1000
DEADLINE_S = 900
GONE_S = 90
STANDIN = "kvtax_fleet.standin"


def standins(replayers: int = 1, repeats: int = 1, step_us: int = 20_000) -> str:
    return STANDINS.format(replayers=replayers, repeats=repeats, step_us=step_us)


class Experiment(HeadCommand):
    """The experiment over the cluster's hosts, and its runs in folder/run."""

    def __init__(
        self, cluster: RayCluster, folder: Path, config: str, *more: str
    ) -> None:
        self.out = folder / "run"
        path = folder / "config.toml"
        path.write_text(config)
        command = ["kvtax", "fleet", str(path), "--out", str(self.out)]
        command += ["--ray", cluster.address, *more]
        super().__init__(cluster, folder / "log", *command, deadline_s=DEADLINE_S)

    def runs(self) -> list[ArmRun]:
        return read_run(self.out)

    def is_replaying(self, run: str = "linear@2/r0") -> bool:
        """Whether some requests have ended."""
        records = self.out / run / "replay.jsonl"
        return records.exists() and records.read_bytes().count(b'"request"') > 3


def nothing_stays(cluster: RayCluster) -> None:
    kinds = (STANDIN, "kvtax proxy", "kvtax fleet", "vllm.entrypoints", "fleet.")
    cluster.nothing_stays(*kinds, within_s=GONE_S)


def has_served_each_request_once(run: ArmRun) -> None:
    assert run.info.status == "ok", run.info.error
    ids = [one.id for one in run.requests]
    assert len(ids) == len(set(ids)) == run.info.trace.requests
    assert {one.status for one in run.requests} == {"ok"}
    assert {one.id for one in run.decisions} == set(ids)
    assert run.info.freshness.fresh


def is_by_one_clock(run: ArmRun) -> None:
    """The proxy, on the first host, decides after a request was sent and before its
    first token came: wherever those were recorded."""
    decided_ns = {one.id: one.at_ns for one in run.decisions}
    residual_us = max(one.clock.residual_us for one in run.info.hosts)
    assert residual_us < 50_000
    for one in run.requests:
        at_ns = decided_ns[one.id]
        assert one.sent_ns - residual_us * 1e3 < at_ns
        assert at_ns < one.first_token_ns + residual_us * 1e3


def on_hosts(run: ArmRun, hosts: list[Host]) -> None:
    """Each of `hosts` had one instance, and no other had any."""
    had = {one.host: one.instances for one in run.info.hosts if one.instances}
    assert set(had) == {host.address for host in hosts}
    assert sorted(chain(*had.values())) == ["i0", "i1"]
    for instance in run.info.instances:
        assert instance.name in had[urlsplit(instance.url).hostname]


@pytest.fixture(scope="module")
def two() -> Iterator[RayCluster]:
    with RayCluster(2, ahead_s=AHEAD_S) as cluster:
        yield cluster


@pytest.fixture
def three() -> Iterator[RayCluster]:
    with RayCluster(3, ahead_s=AHEAD_S) as cluster:
        yield cluster


@pytest.mark.parametrize("replayers", [1, 2])
def test_a_fleet_over_hosts_with_other_clocks_ends_well(two, tmp_path, replayers):
    store = str(tmp_path / "store")
    with Experiment(two, tmp_path, standins(replayers), "--store", store) as found:
        status = found.status()
    (run,) = found.runs()
    assert set(Store(f"{store}/run").pieces()) == {"linear@2/r0"}, found.printed
    has_served_each_request_once(run)
    on_hosts(run, two.hosts)
    ahead_s = {one.host: one.clock.ahead_us / 1e6 for one in run.info.hosts}
    head, other = two.hosts
    assert abs(ahead_s[head.address]) < 0.1
    assert abs(ahead_s[other.address] - AHEAD_S) < 0.1
    is_by_one_clock(run)
    assert run.end is not None and run.end.scheduled == run.info.trace.requests
    assert [one.replays for one in run.info.hosts] == [replayers > 1] * 2
    assert all(one.machine.busy_mean is not None for one in run.info.hosts)
    assert (found.out / "report.md").exists()
    assert status in (0, 1), found.printed
    nothing_stays(two)


def test_a_host_is_lost_and_the_run_is_made_again_on_those_that_are_left(
    three, tmp_path
):
    with Experiment(three, tmp_path, standins(step_us=300_000)) as found:
        found.wait(found.is_replaying)
        lost = three.hosts[1]
        assert lost.processes(STANDIN)
        lost.kill()
        found.status()
    assert f"given up {lost.address}" in found.printed
    assert "linear@2/r0: a host was lost" in found.printed
    (run,) = found.runs()
    has_served_each_request_once(run)
    on_hosts(run, [three.hosts[0], three.hosts[2]])
    nothing_stays(three)


def test_with_too_few_hosts_left_the_run_has_failed_and_resume_makes_it(tmp_path):
    with RayCluster(2, ahead_s=AHEAD_S) as cluster:
        _lose_and_resume(cluster, tmp_path)


def _lose_and_resume(cluster: RayCluster, tmp_path: Path) -> None:
    config, lost = standins(repeats=2, step_us=100_000), cluster.hosts[1]
    with Experiment(cluster, tmp_path, config) as found:
        found.wait(lambda: found.is_replaying("linear@2/r1"))
        lost.kill()
        assert found.status() == 3, found.printed
    assert "--resume goes on" in found.printed
    kept, failed = found.runs()
    has_served_each_request_once(kept)
    assert failed.info.status == "failed"
    assert "a fleet needs 2 hosts" in failed.info.error
    assert lost.address in failed.info.error
    nothing_stays(cluster)
    kept_at = (kept.folder / "arm.json").stat().st_mtime_ns
    cluster.add()
    with Experiment(cluster, tmp_path, config, "--resume") as found:
        assert found.status() in (0, 1), found.printed
    for run in found.runs():
        has_served_each_request_once(run)
    assert (kept.folder / "arm.json").stat().st_mtime_ns == kept_at


def test_the_first_host_is_lost_and_the_command_says_so(tmp_path):
    with RayCluster(2, ahead_s=AHEAD_S) as cluster:
        with Experiment(cluster, tmp_path, standins(step_us=300_000)) as found:
            found.wait(found.is_replaying)
            cluster.hosts[0].kill()
            assert found.status() == 3, found.printed
        assert "the Ray cluster is lost" in found.printed
        nothing_stays(cluster)


def test_an_instance_that_ends_fails_the_run_and_its_host_stays(two, tmp_path):
    with Experiment(two, tmp_path, standins(repeats=2, step_us=200_000)) as found:
        found.wait(found.is_replaying)
        (pid,) = two.hosts[1].processes(STANDIN)
        os.kill(pid, signal.SIGKILL)
        assert found.status() == 1, found.printed
    failed, after = found.runs()
    assert f"{two.hosts[1].address}: i0 ended" in failed.info.error
    has_served_each_request_once(after)
    nothing_stays(two)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_the_command_is_ended_and_no_instance_stays_on_any_host(
    two, tmp_path, number, status
):
    with Experiment(two, tmp_path, standins(step_us=300_000)) as found:
        found.wait(found.is_replaying)
        assert all(host.processes(STANDIN) for host in two.hosts)
        found.process.send_signal(number)
        assert found.status() == status, found.printed
        nothing_stays(two)
    with Experiment(two, tmp_path, standins(), "--resume") as other:
        assert other.status() == 2
    assert "cannot resume" in other.printed


def test_kv_goes_from_one_host_to_the_other_and_engine_records_are_by_one_clock(
    two, tmp_path
):
    with Experiment(two, tmp_path, REAL) as found:
        found.status()
    (run,) = found.runs()
    has_served_each_request_once(run)
    on_hosts(run, two.hosts)
    assert {one.prefill_instance for one in run.requests} == {"i0"}
    assert {one.instance for one in run.requests} == {"i1"}
    _, after = run.counters["i1"]
    pulled = [
        float(line.rsplit(" ", 1)[1])
        for line in after.splitlines()
        if 'source="external_kv_transfer"' in line and "_total" in line
    ]
    assert sum(pulled) > 0
    begun_ns = min(one.sent_ns for one in run.requests)
    ended_ns = max(one.end_ns for one in run.requests)
    for instance in ("i0", "i1"):
        folder = run.folder / "instances" / instance
        assert (folder / "server.log").exists()
        requests = (only_life(folder) / "engine_request.jsonl").read_text()
        arrivals = [
            json.loads(line)["arrival_ns"] for line in requests.splitlines()[1:]
        ]
        assert len(arrivals) == len(run.requests)
        assert all(begun_ns < one < ended_ns for one in arrivals)
    analysis = json.loads((found.out / "analysis.json").read_text())
    assert "pools@2" in str(analysis["arms"])
    nothing_stays(two)
