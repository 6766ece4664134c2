# SPDX-License-Identifier: Apache-2.0
"""One measurement at a time on a machine, and no server that nobody knows of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvtax.paths import REPOSITORY
from kvtax.proc import machine_lock as machine_lock_module
from kvtax.proc.machine_lock import MachineBusy, machine_lock, supervisors
from kvtax.proc.supervise import Supervised
from tests.engine.living import eventually

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
HOLD = """\
import sys, time
from kvtax.proc import machine_lock
machine_lock.MEASUREMENT = "\\0" + sys.argv[1]
with machine_lock.machine_lock():
    print("held", flush=True)
    time.sleep(600)
"""
DEADLINE_S = 120.0


@pytest.fixture
def own_lock(monkeypatch) -> str:
    """Its name. The machine's own may be held by a measurement that goes on beside."""
    name = f"kvtax-test-{os.getpid()}"
    monkeypatch.setattr(machine_lock_module, "MEASUREMENT", f"\0{name}")
    return name


def test_a_second_measurement_is_refused_and_the_next_one_is_not(own_lock):
    with machine_lock(), pytest.raises(MachineBusy, match="wait for its end"):
        machine_lock().__enter__()
    with machine_lock():
        pass


def test_who_waits_gets_the_machine_when_its_owner_has_ended(own_lock, capsys):
    command = [sys.executable, "-c", HOLD.replace("600", "2"), own_lock]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(MachineBusy):
            machine_lock(0.1).__enter__()
        with machine_lock(DEADLINE_S):
            assert holder.wait() == 0
    assert f"process {holder.pid}" in capsys.readouterr().err


def test_a_killed_measurement_holds_the_machine_no_longer(own_lock):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, own_lock],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(MachineBusy) as busy:
        machine_lock().__enter__()
    assert f"process {holder.pid}" in str(busy.value)
    assert f"in {REPOSITORY})" in str(busy.value)
    holder.kill()
    holder.communicate()
    with machine_lock():
        pass


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_supervisor_is_known_until_it_ends_however_it_does(end, tmp_path):
    with Supervised(SLEEP, dict(os.environ), tmp_path / "log") as running:
        eventually(lambda: running.supervisor_pid in supervisors())
        os.kill(running.supervisor_pid, end)
        eventually(lambda: running.supervisor_pid not in supervisors())


def test_what_is_started_keeps_its_bytecode(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    says = "import sys; print(sys.dont_write_bytecode)"
    command = [sys.executable, "-c", says]
    with Supervised(command, dict(os.environ), tmp_path / "log") as running:
        assert running.wait(DEADLINE_S) == 0
    assert (tmp_path / "log").read_text() == "False\n"
