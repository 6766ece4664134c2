# SPDX-License-Identifier: Apache-2.0
"""Nothing that a Supervised command started outlives the one who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from kvtax.proc import supervise
from kvtax.proc.supervise import Supervised
from tests.engine.living import content, eventually, gone

DEADLINE_S = 120.0
# A command with a grandchild that has left its session, as daemons do. Both write
# their process ids; the command ignores SIGTERM if told to.
STUBBORN = """
import os, signal, sys, tempfile, time
folder, deaf = sys.argv[1], sys.argv[2] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(f"{folder}/daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
tempfile.mkstemp()
open(f"{folder}/scratch", "w").write(tempfile.gettempdir())
open(f"{folder}/command", "w").write(str(os.getpid()))
time.sleep(600)
"""

OWNER = """
import os, sys, time
from pathlib import Path
from kvtax.proc import supervise
from kvtax.proc.supervise import Supervised
folder = Path(sys.argv[1])
command = [sys.executable, str(folder / "stubborn.py"), str(folder), "obedient"]
running = Supervised(command, dict(os.environ), folder / "log")
(folder / "supervisor").write_text(str(running._process.pid))
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stubborn.py").write_text(textwrap.dedent(STUBBORN))
    (tmp_path / "owner.py").write_text(textwrap.dedent(OWNER))
    return tmp_path


def start(folder: Path, manner: str = "obedient") -> Supervised:
    command = [sys.executable, str(folder / "stubborn.py"), str(folder), manner]
    return Supervised(command, dict(os.environ), folder / "log")


def pids(folder: Path) -> list[int]:
    """Process ids of command and daemon, once both have written them."""
    return [int(content(folder / name)) for name in ("command", "daemon")]


def test_stop_ends_the_command_and_its_daemon_and_removes_its_scratch(folder):
    with start(folder) as running:
        processes = pids(folder)
        scratch = Path(content(folder / "scratch"))
        assert set(processes) <= set(running.pids())
        assert scratch.exists()
    assert gone(processes)
    assert not scratch.exists()


@pytest.mark.slow
def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(folder, monkeypatch):
    monkeypatch.setattr(supervise, "TERM_GRACE_S", 0.5)
    with start(folder, "deaf"):
        processes = pids(folder)
    assert gone(processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_dies_of(number, folder):
    owner = subprocess.Popen(
        [sys.executable, folder / "owner.py", folder],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    processes = [*pids(folder), int(content(folder / "supervisor"))]
    os.kill(owner.pid, number)
    owner.wait()
    eventually(lambda: gone(processes))
    assert not Path(content(folder / "scratch")).exists()


def test_stop_leaves_nothing_when_the_supervisor_itself_was_killed(folder):
    running = start(folder)
    processes = pids(folder)
    # As Server.wait_ready() does: what was never seen cannot be found again.
    assert set(processes) <= set(running.pids())
    running._process.kill()
    running._process.wait()
    running.stop()
    eventually(lambda: gone(processes))
    assert not Path(content(folder / "scratch")).exists()


def test_a_stray_sigterm_to_the_supervisor_takes_the_command_with_it(folder):
    running = start(folder)
    processes = pids(folder)
    running._process.terminate()
    running.wait(DEADLINE_S)
    assert gone(processes)


def test_exit_status_and_output_of_the_command_are_kept(folder):
    command = [sys.executable, "-c", "print('out'); raise SystemExit(7)"]
    running = Supervised(command, dict(os.environ), folder / "log")
    assert running.wait(DEADLINE_S) == 7
    assert (folder / "log").read_text() == "out\n"


def test_a_log_has_stars_for_secrets_whoever_of_the_command_prints_them(folder):
    script = "import os, subprocess, sys, time; print('a sesame', flush=True)\n"
    script += "subprocess.run(['sh', '-c', 'printf se; sleep 0.1; echo same >&2'])\n"
    script += "assert 'KVTAX_SECRETS' not in os.environ; sys.stdout.write('sesame!')"
    command = [sys.executable, "-c", script]
    log = folder / "log"
    running = Supervised(command, dict(os.environ), log, secrets=["sesame", "same"])
    assert running.wait(DEADLINE_S) == 0
    assert log.read_text() == "a ***\n***\n***!"
    assert "sesame" not in str(running._process.args[:4])


@pytest.mark.parametrize("ending", ["os._exit(0)", "time.sleep(600)"])
def test_what_openmp_leaves_in_memory_goes_with_the_command(ending, tmp_path):
    script = "import os, pathlib, time\n"
    script += "name = f'__KMP_REGISTERED_LIB_{os.getpid()}_test'\n"
    script += "pathlib.Path('/dev/shm', name).touch(); print(name, flush=True)\n"
    log = tmp_path / "log"
    command = [sys.executable, "-c", script + ending]
    with Supervised(command, dict(os.environ), log):
        name = content(log).strip()
    assert not Path("/dev/shm", name).exists()
