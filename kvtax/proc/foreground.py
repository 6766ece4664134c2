# SPDX-License-Identifier: Apache-2.0
"""Run a command in the user's terminal so that nothing of it outlives us.

As in kvtax.proc.supervise a small supervisor stands between us and the command: the
subreaper of the command's descendants, at one end of a pipe that closes when we go
away, by SIGKILL too. Here the command ends when it wants to, and gets our signals. What
the shell handed over goes to the command: streams, other descriptors, ignored signals.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from kvtax.proc.supervise import (
    adopt_orphans,
    begin_child,
    descendants,
    kill_all,
    remove_shared_memory,
    shared_memory,
    signal_all,
    stop_tree,
)
from kvtax.signals import SIGNALS, heeded

FORWARDED = (*SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# As a shell has them.
CANNOT_EXECUTE, NOT_FOUND = 126, 127


class Watch(Protocol):
    """A condition that ends the command: checked when its descriptor is readable."""

    def fileno(self) -> int:
        """Return the descriptor."""

    def check(self, pids: Sequence[int]) -> int | None:
        """Return the exit code if these processes must end, else None."""


@dataclass(frozen=True)
class Foreground:
    """A command, its environment, its `own` folder, which goes with it, and a watch."""

    command: Sequence[str]
    env: dict[str, str]
    own: Path
    watch: Watch | None = None


def run_in_foreground(
    job: Foreground, after: Callable[[int], int] = lambda code: code
) -> int:
    """Run the command and return its exit code as a shell does; remove its folder.

    Before that, `after` may look at the folder and return another exit code. Signals
    that would end this process go to the command, which has a session of its own:
    Ctrl-C reaches it once.
    """
    adopt_orphans()
    owner, ours = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    supervisor = os.fork()
    if supervisor == 0:
        os.close(ours)
        _end_with(lambda: _supervise(job, owner))
    os.close(owner)
    _forward_signals(supervisor)
    _, status = os.waitpid(supervisor, 0)
    # Only a supervisor that was killed leaves anything.
    kill_all(lambda: descendants(os.getpid()))
    try:
        return after(_exit_code(os.waitstatus_to_exitcode(status)))
    finally:
        shutil.rmtree(job.own, ignore_errors=True)


def _end_with(work: Callable[[], int]) -> NoReturn:
    """End this forked process with the exit code that `work` returns."""
    status = 1
    try:
        os.setsid()
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _supervise(job: Foreground, owner: int) -> int:
    """Run the command until it has ended or `owner` is closed; leave nothing."""
    adopt_orphans()
    try:
        process = _start(job.command, job.env)
    except OSError as error:
        print(f"kvtax: {job.command[0]}: {error.strerror}", file=sys.stderr)
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return NOT_FOUND if missing else CANNOT_EXECUTE
    shared: set[Path] = set()
    ends: list[int] = []
    code = None

    def note_shared() -> None:
        shared.update(shared_memory(descendants(os.getpid())))

    try:
        # A signal may end the processes before stop_tree sees what they share.
        _forward_signals(process.pid, note_shared)
        command = os.pidfd_open(process.pid)
        watched = [job.watch.fileno()] if job.watch else []
        while code is None and not {owner, command} & {*ends}:
            ends, _, _ = select.select([owner, command, *watched], [], [])
            if job.watch:
                code = job.watch.check(descendants(os.getpid()))
    finally:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        stop_tree(process)
        remove_shared_memory(shared)
        if owner in ends:
            shutil.rmtree(job.own, ignore_errors=True)
    return _exit_code(process.wait()) if code is None else code


def _start(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the command; a script without a first line for it runs in the shell."""
    try:
        return _popen(command, env)
    except OSError as error:
        script = shutil.which(command[0])
        if error.errno != errno.ENOEXEC or not script:
            raise
        return _popen(["/bin/sh", script, *command[1:]], env)


def _popen(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, preexec_fn=begin_child, close_fds=False)


def _forward_signals(pid: int, before: Callable[[], None] = lambda: None) -> None:
    """Send signals on to `pid`, those too that came while they were blocked.

    `before` is called before each.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        before()
        signal_all([pid], number)

    for number in heeded(FORWARDED):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _exit_code(status: int) -> int:
    return 128 - status if status < 0 else status
