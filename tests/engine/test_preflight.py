# SPDX-License-Identifier: Apache-2.0
"""What would make a sweep fail or lie is found before it starts."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time

import pytest

from kvtax.engine import ServerError, preflight
from kvtax.engine.connector import Connector, load_connector
from kvtax.engine.environment import cpu_preload
from kvtax.engine.installation import Installation, installation
from kvtax.engine.preflight import PreflightError
from kvtax.proc.supervise import Supervised, supervisors
from microbench.profile import load_profile


def with_mooncake(version: str) -> Installation:
    """This installation, as if it had that release."""
    name = "mooncake-transfer-engine-non-cuda"
    ours = installation()
    return dataclasses.replace(ours, versions=ours.versions | {name: version})


@pytest.mark.parametrize("version", ["0.3.10", "0.3.11.post1"])
def test_a_mooncake_that_reports_writes_too_early_is_refused(version):
    with pytest.raises(PreflightError, match=rf"{version}.*0\.3\.12"):
        preflight.check_connector(
            load_connector("mooncake_both"), with_mooncake(version)
        )


@pytest.mark.parametrize("version", ["0.3.12", "0.3.13.post1", "0.4"])
def test_a_mooncake_without_that_race_is_accepted(version):
    preflight.check_connector(load_connector("mooncake_both"), with_mooncake(version))


def test_few_open_files_are_refused_before_a_server_starts(monkeypatch):
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (64, 64))
    problems = preflight.resource_problems(load_profile("cpu"))
    assert any("64 open files" in problem for problem in problems)


def test_a_connector_whose_package_is_missing_is_refused_by_name():
    wanting = Connector(summary="", patches=[], package="no_such_one")
    with pytest.raises(PreflightError, match="no_such_one is not installed"):
        preflight.check_connector(wanting)


def test_a_config_without_a_connector_needs_no_package():
    preflight.check_connector(Connector(summary="", patches=[]))


@pytest.mark.slow
def test_a_server_of_another_run_is_waited_for_and_then_refused(tmp_path, monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    # A supervisor that is not below us: as one left by a sweep killed just now.
    monkeypatch.setattr(preflight, "descendants", lambda pid: [])
    with Supervised(sleeper, dict(os.environ), tmp_path / "log") as survivor:
        # Others on this machine do not count: they may go on for longer.
        ours = {survivor.supervisor_pid}
        monkeypatch.setattr(preflight, "supervisors", lambda: supervisors() & ours)
        # It makes itself known a moment after its start.
        while not supervisors() & ours:
            time.sleep(0.01)
        monkeypatch.setattr(preflight, "SURVIVOR_DEADLINE_S", 0.5)
        with pytest.raises(PreflightError, match="servers of another run"):
            preflight._await_survivors()
        monkeypatch.setattr(preflight, "SURVIVOR_DEADLINE_S", 30)
        stopping = threading.Timer(0.5, survivor.stop)
        stopping.start()
        preflight._await_survivors()
        stopping.join()


def test_all_that_is_missing_is_said_at_once(monkeypatch):
    monkeypatch.setattr(preflight, "_available_gib", lambda: 1.0)
    monkeypatch.setattr(preflight, "MIN_DISK_GIB", 1e9)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PreflightError) as refused:
        preflight.check_machine(load_profile("gpu"))
    for reason in ("run bash setup.sh gpu", "nvidia-smi", "of memory", "of disk"):
        assert reason in str(refused.value)


def test_the_preloaded_libraries_need_no_sbin_in_path(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert len(cpu_preload()) == 2


@pytest.mark.parametrize("separator", " :")
def test_a_path_that_the_loader_would_split_is_refused(separator):
    prefix = f"/home/me/my{separator}checkout/.venv"
    ours = dataclasses.replace(installation(), prefix=prefix)
    with pytest.raises(ServerError, match="move the checkout"):
        cpu_preload(ours)
    with pytest.raises(ServerError, match="make the environment again"):
        cpu_preload(dataclasses.replace(ours, python="/home/me/python"))


def test_a_library_that_the_loader_would_skip_is_named(tmp_path):
    ours = dataclasses.replace(installation(), prefix=str(tmp_path))
    with pytest.raises(ServerError, match=r"setup\.sh.*libiomp5\.so"):
        cpu_preload(ours)
    with pytest.raises(ServerError, match=r"/home/me/python needs.*libiomp5\.so"):
        cpu_preload(dataclasses.replace(ours, python="/home/me/python"))
