# SPDX-License-Identifier: Apache-2.0
"""A command in the foreground gets our signals, and nothing of it outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from tests.engine.living import content, eventually, gone

OWNER = """
import os, sys
from pathlib import Path
from kvtax.proc.foreground import run_in_foreground
own = Path(sys.argv[1])
sys.exit(run_in_foreground(sys.argv[2:], dict(os.environ), own))
"""
# It has a daemon, and ends well on SIGTERM and SIGUSR1.
SERVER = """
import os, signal, sys, time
def leave(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, leave)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    open("daemon", "w").write(str(os.getpid()))
    time.sleep(600)
open("server", "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def own(tmp_path) -> Path:
    """The folder that goes with the command."""
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


@pytest.fixture
def begin(tmp_path, own) -> Callable[..., subprocess.Popen]:
    def begin(script: str) -> subprocess.Popen:
        command = [sys.executable, "-c", textwrap.dedent(script)]
        return subprocess.Popen(
            [sys.executable, "-c", OWNER, str(own), *command],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return begin


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("print(input())", 0),
    ],
)
def test_the_exit_code_and_the_streams_are_the_commands(begin, own, script, code):
    process = begin(script)
    printed, _ = process.communicate("through\n", timeout=300)
    assert process.returncode == code
    assert printed == ("through\n" if code == 0 else "")
    assert not own.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_command_which_ends_as_it_likes(begin, own, tmp_path, number):
    process = begin(SERVER)
    pids = [int(content(tmp_path / name)) for name in ("server", "daemon")]
    process.send_signal(number)
    printed, _ = process.communicate(timeout=300)
    assert (printed, process.returncode) == (f"got {number.name}\n", 7)
    assert gone(pids)
    assert not own.exists()


@pytest.mark.parametrize("killed", ["owner", "supervisor", "server"])
def test_nothing_is_left_whichever_process_is_killed(begin, own, tmp_path, killed):
    process = begin(SERVER)
    server, daemon = (int(content(tmp_path / name)) for name in ("server", "daemon"))
    parent = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    pid = {"owner": process.pid, "supervisor": parent, "server": server}[killed]
    os.kill(pid, signal.SIGKILL)
    process.wait(300)
    eventually(lambda: gone([server, daemon, parent]) and not own.exists())


def test_a_command_that_cannot_be_run_is_an_error_in_one_line(tmp_path, own):
    owner = [sys.executable, "-c", OWNER, str(own), "no-such-command"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(owner, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "kvtax: [Errno 2] No such file or directory: 'no-such-command'\n"
    )
    assert not own.exists()
