# SPDX-License-Identifier: Apache-2.0
"""Run a command so that nothing of it outlives us, however we end.

Between us and the command stands a small supervisor process (this module's main).
It is the command's subreaper, so that every descendant stays below it even after a
double fork, and it holds one end of a pipe whose other end only we have. When we close
it, or go away by SIGKILL, it stops the whole tree; a byte before that gives the command
its time to end by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from kvtax.paths import REPOSITORY
from kvtax.signals import SIGNALS, exit_on_signals

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# vLLM gives its engine core 5 s of its own; what the command leaves behind gets less.
TERM_GRACE_S = 15.0
ORPHAN_GRACE_S = 3.0
# For both, where we were interrupted: nobody reads what the command would write yet.
INTERRUPTED_GRACE_S = 0.3
# Seconds after SIGKILL: a process of another user, or one in the kernel, may stay.
KILL_DEADLINE_S = 10.0
GRACE = b"g"
# Name of a supervisor in the table of processes.
SUPERVISOR = "kvtax-supervise"
REMOVALS = 50
# The supervisor's variable with what it masks, as JSON; the command does not get it.
SECRETS = "KVTAX_SECRETS"

# Shared memory that outlives the processes of a server which are killed: of vLLM's
# communicator for CPUs, named by a port, and of Python, named by chance.
SHARED = re.compile(r"/dev/shm/(?:\S+-cpushm_\d+|psm_[0-9a-f]+)$", re.MULTILINE)

_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A child process that was forked, with the calls of a Popen that we need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            select.select([ended], [], [], timeout)
            os.close(ended)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._status is None:
                os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | Child


@dataclass(frozen=True)
class Job:
    """A command to supervise, its environment, and how it is stopped."""

    command: list[str]
    env: dict[str, str]
    scratch: str
    term_grace_s: float
    secrets: list[str]


class Supervised:
    """A running command with everything it started.

    `command` runs with `env` and both its output streams in `log`, where `***` stands
    for each of `secrets`. Its temporary files go to `scratch`, by default a new folder,
    which is removed after it has ended.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        log: Path,
        scratch: Path | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        # Orphans of a killed supervisor come to us, where stop() finds them.
        adopt_orphans()
        self._last_seen: list[int] = []
        # vLLM leaves sockets where temporary files go, so those get a place that goes
        # with the command.
        self._scratch = str(scratch or tempfile.mkdtemp(prefix="kvtax-"))
        places = {"TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch}
        # Where it is set, each process would compile vLLM's 4,000 modules anew.
        env = {k: v for k, v in env.items() if k != "PYTHONDONTWRITEBYTECODE"}
        job = Job(command, env | places, self._scratch, TERM_GRACE_S, list(secrets))
        # The supervisor has one end of a pipe: the other end closes when we go away.
        supervisors_end, ours = os.pipe()
        self._owns = os.fdopen(ours, "wb", buffering=0)
        try:
            with os.fdopen(supervisors_end) as owner, log.open("ab") as output:
                self._process = self._start(job, owner, output)
        except BaseException:
            self._owns.close()
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def _start(self, job: Job, owner: IO[str], output: IO[bytes]) -> Process:
        """Start the supervisor: its standard input is `owner`."""
        supervisor = [sys.executable, "-m", "kvtax.proc.supervise"]
        return subprocess.Popen(
            [*supervisor, job.scratch, str(job.term_grace_s), *job.command],
            env=job.env | {SECRETS: json.dumps(job.secrets)},
            cwd=REPOSITORY,
            stdin=owner,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Exit status of the command, None while it runs."""
        return self._process.poll()

    @property
    def supervisor_pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        return self._process.wait(timeout_s)

    def pids(self) -> list[int]:
        """List the command and its descendants, without the supervisor."""
        if below := descendants(self._process.pid):
            self._last_seen = below
        return below

    def stop(self, with_grace: bool = True) -> None:
        """Send SIGTERM, then SIGKILL after a grace; return when nothing is left.

        A second call does nothing.
        """
        if self._owns.closed:
            return
        self.pids()
        with suppress(BrokenPipeError), self._owns:
            if with_grace:
                self._owns.write(GRACE)
        try:
            self._process.wait(TERM_GRACE_S + ORPHAN_GRACE_S + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Only if the supervisor itself was killed is there anything left here, and
        # what was below it when last seen has become ours.
        left = set(self._last_seen) & set(descendants(os.getpid()))
        shared = shared_memory(left)
        kill_all(lambda: left & set(descendants(os.getpid())))
        remove_shared_memory(shared)
        remove_openmp_segment(self._process.pid)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.stop(with_grace=not is_interruption(kind))


def is_interruption(kind: type[BaseException] | None) -> bool:
    """Return whether an exception of this class ends us on a signal."""
    return kind is not None and issubclass(kind, SystemExit | KeyboardInterrupt)


def descendants(root: int) -> list[int]:
    """List the living processes below `root`, parents first."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(root).children(recursive=True)
        return [process.pid for process in below if _lives(process)]
    return []


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def supervisors() -> set[int]:
    """Return the process ids of all supervisors of this user."""
    mine = os.geteuid()
    return {
        process.pid
        for process in psutil.process_iter(["name", "uids", "status"])
        if process.info["name"] == SUPERVISOR
        and process.info["uids"].effective == mine
        and process.info["status"] != psutil.STATUS_ZOMBIE
    }


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of the processes that are left and may be signalled."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(living: Callable[[], Collection[int]]) -> None:
    """Send SIGKILL to the `living` until there are none, or name those that stay.

    A process may fork meanwhile, so `living` is evaluated again and again.
    """
    deadline = time.monotonic() + KILL_DEADLINE_S
    while left := living():
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, left))
            print(f"kvtax: cannot end process {pids}", file=sys.stderr, flush=True)
            return
        signal_all(left, signal.SIGKILL)
        time.sleep(0.02)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Set the name of this process in the table of processes."""
    Path("/proc/self/comm").write_text(name)


def begin_child() -> None:
    """Make a new child end with its parent, and take signals again."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    set_name("python")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def stop_tree(
    process: Process,
    term_grace_s: float = TERM_GRACE_S,
    orphan_grace_s: float = ORPHAN_GRACE_S,
) -> None:
    """End the command and all that it started: SIGTERM, then SIGKILL after a grace."""
    # The command too if it has ended by itself: nobody sees it among the living.
    stopped = {process.pid, *descendants(os.getpid())}
    shared = shared_memory(stopped)
    with suppress(PermissionError):
        process.terminate()
    try:
        process.wait(term_grace_s)
    except subprocess.TimeoutExpired:
        signal_all([process.pid], signal.SIGKILL)
    deadline = time.monotonic() + orphan_grace_s
    signal_all(descendants(os.getpid()), signal.SIGTERM)
    while descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_all(lambda: descendants(os.getpid()))
    remove_shared_memory(shared)
    for pid in stopped:
        remove_openmp_segment(pid)


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """List the segments of SHARED that the processes have mapped."""
    segments: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            maps = Path(f"/proc/{pid}/maps").read_text()
            segments |= {Path(name) for name in SHARED.findall(maps)}
    return segments


def remove_shared_memory(segments: set[Path]) -> None:
    """Remove the segments that no living process has mapped."""
    if segments:
        for segment in segments - shared_memory(psutil.pids()):
            segment.unlink(missing_ok=True)


def remove_openmp_segment(pid: int) -> None:
    """Remove what OpenMP leaves in memory of a process that was killed or a fork."""
    for segment in Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
        segment.unlink(missing_ok=True)


def supervise(job: Job, start: Callable[[int | None], Process]) -> int:
    """Run a job until it has ended or standard input is closed; return its status.

    `start` starts it, with both output streams in a file descriptor, or in ours.
    """
    adopt_orphans()
    masked, output = os.pipe() if job.secrets else (None, None)
    # A signal that comes before the command can be stopped waits until it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    process = start(output)
    if output is not None:
        os.close(output)
    set_name(SUPERVISOR)
    masking = threading.Thread(target=_copy_masked, args=(masked, job.secrets))
    masking.start()
    graces_s = job.term_grace_s, ORPHAN_GRACE_S
    try:
        exit_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        owner = sys.stdin.fileno()
        ended, _, _ = select.select([owner, os.pidfd_open(process.pid)], [], [])
        if owner in ended and os.read(owner, 1) != GRACE:
            graces_s = INTERRUPTED_GRACE_S, INTERRUPTED_GRACE_S
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stop_tree(process, *graces_s)
        masking.join()
        _remove(Path(job.scratch))
    return process.wait()


def main() -> int:
    scratch, term_grace_s, *command = sys.argv[1:]
    secrets = json.loads(os.environ.pop(SECRETS, "[]"))
    job = Job(command, dict(os.environ), scratch, float(term_grace_s), secrets)

    def start(output: int | None) -> Process:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=begin_child,
        )

    return supervise(job, start)


def _copy_masked(masked: int | None, secrets: list[str]) -> None:
    """Copy the command's lines to our own output, until nobody can write any."""
    if masked is None:
        return
    with os.fdopen(masked, "rb") as lines:
        for line in lines:
            for secret in secrets:
                line = line.replace(secret.encode(), b"***")
            with suppress(OSError):  # a full disk is no reason to stop the command
                os.write(sys.stdout.fileno(), line)


def _remove(scratch: Path) -> None:
    """Remove the folder, again where a process that is ending puts a file into it."""
    for _ in range(REMOVALS):
        shutil.rmtree(scratch, ignore_errors=True)
        if not scratch.exists():
            return
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
