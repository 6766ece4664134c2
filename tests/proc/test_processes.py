# SPDX-License-Identifier: Apache-2.0
"""What a command started ends with its starter, supervised or in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from kvtax.proc import machine_lock as machine_lock_module
from kvtax.proc import supervise
from kvtax.proc.machine_lock import MachineBusy, machine_lock
from kvtax.proc.supervise import Supervised, supervisors
from tests.proc.living import content, eventually, gone

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_stray_sigterm_to_the_supervisor_takes_the_command_with_it(folder):
    running = start(folder)
    processes = pids(folder)
    running._process.terminate()
    running.wait(DEADLINE_S)
    assert gone(processes)


@pytest.mark.slow
def test_exit_status_and_output_of_the_command_are_kept(folder):
    command = [sys.executable, "-c", "print('out'); raise SystemExit(7)"]
    running = Supervised(command, dict(os.environ), folder / "log")
    assert running.wait(DEADLINE_S) == 7
    assert (folder / "log").read_text() == "out\n"


@pytest.mark.slow
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


@pytest.mark.slow
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


SHARES = """
import mmap, os, sys, time
kept = []
for name in sys.argv[1:]:
    file = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_RDWR)
    os.truncate(file, 4096)
    kept.append(mmap.mmap(file, 4096))
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def segments() -> Iterator[list[str]]:
    """Names as vLLM's communicator for CPUs and Python give them, and another's."""
    names = [f"{os.getpid()}-tp:0-[0-1]-cpushm_0", f"psm_{os.getpid():08x}"]
    names.append(f"mine-{os.getpid()}")
    yield names
    for name in names:
        Path("/dev/shm", name).unlink(missing_ok=True)


def left_of(segments: list[str]) -> list[bool]:
    return [Path("/dev/shm", name).exists() for name in segments]


@pytest.mark.slow
def test_memory_that_a_server_shares_goes_with_it(segments, tmp_path):
    command, log = [sys.executable, "-c", SHARES, *segments], tmp_path / "log"
    with Supervised(command, dict(os.environ), log):
        content(log)
        assert left_of(segments) == [True, True, True]
    assert left_of(segments) == [False, False, True]


@pytest.mark.slow
def test_memory_that_another_server_shares_stays(segments, tmp_path):
    command, log = [sys.executable, "-c", SHARES, *segments], tmp_path / "log"
    with Supervised(command, dict(os.environ), log):
        content(log)
        with Supervised(command, dict(os.environ), tmp_path / "other"):
            content(tmp_path / "other")
        assert left_of(segments) == [True, True, True]
    assert left_of(segments) == [False, False, True]


FOREGROUND = """
import os, sys
from pathlib import Path
from kvtax.proc.foreground import Foreground, run_in_foreground
own = Path(sys.argv[1])
sys.exit(run_in_foreground(Foreground(sys.argv[2:], dict(os.environ), own)))
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
            [sys.executable, "-c", FOREGROUND, str(own), *command],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return begin


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_shared_memory_goes_with_a_command_in_the_foreground(
    segments, begin, own, number
):
    script = SHARES.replace("sys.argv[1:]", repr(segments))
    process = begin(script)
    assert process.stdout.readline() == "mapped\n"
    process.send_signal(number)
    process.wait(DEADLINE_S)
    eventually(lambda: left_of(segments) == [False, False, True] and not own.exists())


def run_to_end(own, *command: str, before: str = "", **options):
    owner = [sys.executable, "-c", before + FOREGROUND, str(own), *command]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(owner, env=env, capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("name", "mode", "code", "error"),
    [
        ("no-such-command", None, 127, "No such file or directory"),
        ("./plain-text", 0o644, 126, "Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_ends_as_in_a_shell(
    tmp_path, own, name, mode, code, error
):
    if mode:
        (tmp_path / name).write_text("")
    done = run_to_end(own, name, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr == f"kvtax: {name}: {error}\n"
    assert not own.exists()


def test_a_script_without_a_first_line_for_it_runs_in_the_shell(tmp_path, own):
    (tmp_path / "start").write_text('exec echo "$1"\n')
    (tmp_path / "start").chmod(0o755)
    assert run_to_end(own, "./start", "well", cwd=tmp_path).stdout == "well\n"


def test_an_error_of_the_supervisor_has_its_traceback(own):
    broken = (
        "from kvtax.proc import foreground\nforeground._supervise = lambda *_: {}[1]\n"
    )
    done = run_to_end(own, "true", before=broken)
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 1\n")


IGNORES = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
SHOWS = "import signal; print(signal.getsignal(signal.SIGHUP).name)"


def test_a_signal_that_was_ignored_at_start_stays_ignored(own, tmp_path):
    shown = run_to_end(own, sys.executable, "-c", SHOWS, before=IGNORES).stdout
    assert shown == "SIG_IGN\n"
    script = f"{IGNORES}from kvtax.signals import exit_on_signals; exit_on_signals()\n"
    shown = subprocess.run(
        [sys.executable, "-c", script + SHOWS], cwd=REPOSITORY, capture_output=True
    ).stdout
    assert shown == b"SIG_IGN\n"


LOOP = """
import asyncio
from kvtax.load.client import Stop
async def work():
    Stop().cancels(asyncio.current_task())
asyncio.run(work())
"""


def test_a_loop_puts_no_handler_over_a_signal_that_is_ignored(tmp_path):
    script = IGNORES.replace("SIGHUP", "SIGINT") + LOOP + SHOWS.replace("HUP", "INT")
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True
    ).stdout
    assert shown == b"SIG_IGN\n"
    for room in ("kvtax", "fleet/src"):
        for file in (REPOSITORY / room).rglob("*.py"):
            text = file.read_text()
            assert "add_signal_handler(" not in text or " in heeded(" in text, file


def test_descriptors_pass_to_the_command(own):
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing) as writer:
        number = writer.fileno()
        run_to_end(own, "bash", "-c", f"echo passed >&{number}", pass_fds=[number])
        writer.close()
        assert reader.read() == "passed\n"


def test_a_process_that_may_not_be_signalled_does_not_save_the_others(monkeypatch):
    protected, other = (subprocess.Popen(SLEEP) for _ in range(2))
    kill = os.kill

    def kill_others(pid: int, number: int) -> None:
        if pid == protected.pid:
            raise PermissionError(1, "Operation not permitted")
        kill(pid, number)

    try:
        monkeypatch.setattr(os, "kill", kill_others)
        supervise.signal_all([protected.pid, other.pid], signal.SIGKILL)
        assert other.wait(DEADLINE_S) == -signal.SIGKILL
        monkeypatch.setattr(supervise, "KILL_DEADLINE_S", 0.1)
        supervise.kill_all(lambda: [protected.pid])  # it ends
        assert protected.poll() is None
    finally:
        monkeypatch.undo()
        protected.kill()
        protected.wait()


def test_a_start_that_is_interrupted_leaves_no_scratch(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervised, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Supervised(SLEEP, dict(os.environ), tmp_path / "log", scratch)
    assert not scratch.exists()


@pytest.mark.slow
def test_an_interruption_does_not_wait_for_a_stubborn_command(folder):
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), start(folder, "deaf"):
        pids(folder)
        began_s = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began_s < supervise.TERM_GRACE_S / 3


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
HOLD = """\
import sys, time
from kvtax.proc import machine_lock
machine_lock.MEASUREMENT = sys.argv[1]
with machine_lock.machine_lock():
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def own_lock(monkeypatch) -> str:
    """Its name. The machine's own may be held by a measurement that goes on beside."""
    name = f"kvtax-test-{os.getpid()}.lock"
    monkeypatch.setattr(machine_lock_module, "MEASUREMENT", name)
    return name


def test_a_second_measurement_is_refused_and_the_next_one_is_not(own_lock):
    with machine_lock(), pytest.raises(MachineBusy, match="wait for its end"):
        machine_lock().__enter__()
    with machine_lock():
        pass


def test_a_killed_measurement_holds_the_machine_no_longer(own_lock):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, own_lock], cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(MachineBusy) as busy:
        machine_lock().__enter__()
    assert f"process {holder.pid}" in str(busy.value)
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
