# SPDX-License-Identifier: Apache-2.0
"""Cells of the observatory over hosts: each is there once, and says who measured it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from kvtax.records.observatory_cell import read_cells
from tests.hosts.ray_cluster import ON_CLUSTER, RayCluster

pytestmark = ON_CLUSTER

RELEASE, CONNECTORS = "0.18.1", ["noop", "plain"]
DEADLINE_S = 600


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


def test_two_cells_are_measured_by_two_hosts_and_the_page_says_so(
    checkout: Path,
) -> None:
    command = [sys.executable, "-m", "kvtax", "axes", "--release", RELEASE, "--again"]
    for connector in CONNECTORS:
        command += ["--connector", connector]
    with RayCluster(2, checkout=checkout) as cluster:
        command = cluster.on_head(*command, "--ray", cluster.address)
        done = subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert cluster.processes("kvtax.axes") == []
    results = checkout / "studies" / "observatory"
    kept = read_cells(results / f"{RELEASE}.jsonl.xz")
    cells = [cell for cell in kept if cell.connector in CONNECTORS]
    assert [cell.error for cell in cells] == [None, None]
    hosts = {host.address for host in cluster.hosts}
    assert {cell.host for cell in cells} == hosts
    page = (results / "README.md").read_text()
    for host in hosts:
        assert f"| {host} |" in page
        assert f"{host}: 1 done" in done.stderr
