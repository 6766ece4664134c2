# SPDX-License-Identifier: Apache-2.0
"""Runs a command so that nothing of it outlives us, however we end.

Between us and the command stands a small supervisor process (this module's main).
It is the command's subreaper, so that every descendant stays below it even after a
double fork, and it holds one end of a pipe whose other end only we have: when we
go away, by SIGKILL too, the pipe closes, and it stops the whole tree.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from kvtax.paths import REPOSITORY
from kvtax.proc.machine_lock import announce_supervisor
from kvtax.signals import SIGNALS, exit_on_signals

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# vLLM gives its engine core 5 s of its own; what the command leaves behind gets less.
TERM_GRACE_S = 15.0
ORPHAN_GRACE_S = 3.0
REMOVALS = 50
# The supervisor's variable with what it masks, as JSON; the command does not get it.
SECRETS = "KVTAX_SECRETS"

_libc = ctypes.CDLL(None, use_errno=True)


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
        with log.open("ab") as output:
            supervisor = [sys.executable, "-m", "kvtax.proc.supervise"]
            places = {"TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch}
            # Where it is set, each process would compile vLLM's 4,000 modules anew.
            env = {k: v for k, v in env.items() if k != "PYTHONDONTWRITEBYTECODE"}
            self._process = subprocess.Popen(
                [*supervisor, self._scratch, str(TERM_GRACE_S), *command],
                env=env | places | {SECRETS: json.dumps(secrets)},
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
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
        if found := descendants(self._process.pid):
            self._last_seen = found
        return found

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a grace; returns when nothing is left."""
        self.pids()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(TERM_GRACE_S + ORPHAN_GRACE_S + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Only if the supervisor itself was killed is there anything left here, and
        # what was below it when last seen has become ours.
        left = set(self._last_seen) & set(descendants(os.getpid()))
        signal_all(list(left), signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def descendants(root: int) -> list[int]:
    """List the living processes below `root`, parents first."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(root).children(recursive=True)
        return [process.pid for process in below if _lives(process)]
    return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def begin_child() -> None:
    """In a new child: end with its parent, and take signals again."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def stop_tree(process: subprocess.Popen, term_grace_s: float = TERM_GRACE_S) -> None:
    """End the command and all that it started: SIGTERM, then SIGKILL after a grace."""
    # The command too if it has ended by itself: nobody sees it among the living.
    stopped = {process.pid, *descendants(os.getpid())}
    process.terminate()
    try:
        process.wait(term_grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
    deadline = time.monotonic() + ORPHAN_GRACE_S
    signal_all(descendants(os.getpid()), signal.SIGTERM)
    while descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.05)
    # A process may fork while we look, so look until there is nothing to see.
    while left := descendants(os.getpid()):
        signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
    for pid in stopped:
        remove_openmp_segment(pid)


def remove_openmp_segment(pid: int) -> None:
    """Remove what OpenMP leaves in memory of a process that was killed or a fork."""
    for segment in Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
        segment.unlink(missing_ok=True)


def main() -> int:
    adopt_orphans()
    scratch, term_grace_s, *command = sys.argv[1:]
    secrets = [text.encode() for text in json.loads(os.environ.pop(SECRETS, "[]"))]
    announcement = announce_supervisor()
    # One that comes before the command can be stopped waits until it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if secrets else None,
        stderr=subprocess.STDOUT if secrets else None,
        preexec_fn=begin_child,
    )
    masking = threading.Thread(target=_copy_masked, args=(process.stdout, secrets))
    masking.start()
    try:
        exit_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        owner_gone = sys.stdin.fileno()
        exited = os.pidfd_open(process.pid)
        select.select([owner_gone, exited], [], [])
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stop_tree(process, float(term_grace_s))
        masking.join()
        _remove(Path(scratch))
        announcement.close()
    return process.wait()


def _copy_masked(output: IO[bytes] | None, secrets: list[bytes]) -> None:
    """Copy the command's lines to our own output, until nobody can write any."""
    for line in output or ():
        for secret in secrets:
            line = line.replace(secret, b"***")
        with suppress(OSError):  # a full disk is no reason to stop the command
            os.write(sys.stdout.fileno(), line)


def _remove(scratch: Path) -> None:
    """Again where somebody who has not heard of our end puts a file into it."""
    for _ in range(REMOVALS):
        shutil.rmtree(scratch, ignore_errors=True)
        if not scratch.exists():
            return
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
