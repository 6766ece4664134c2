# SPDX-License-Identifier: Apache-2.0
"""Run a command in the user's terminal so that nothing of it outlives us.

As in kvtax.proc.supervise a small supervisor stands between us and the command: the
subreaper of the command's descendants, at one end of a pipe that closes when we go
away, by SIGKILL too. Here the command ends when it wants to, and gets our signals.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvtax.proc.supervise import (
    adopt_orphans,
    begin_child,
    descendants,
    remove_shared_memory,
    shared_memory,
    signal_all,
    stop_tree,
)
from kvtax.signals import SIGNALS

FORWARDED = (*SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run_in_foreground(
    command: Sequence[str],
    env: dict[str, str],
    own: Path,
    look: Callable[[int], int] = lambda code: code,
) -> int:
    """Run `command` and return its exit code as a shell does; remove the folder `own`.

    Before that, `look` may look at the folder and return another exit code. Signals
    that would end this process go to the command, which has a session of its own:
    Ctrl-C reaches it once.
    """
    adopt_orphans()
    owner, ours = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    supervisor = os.fork()
    if supervisor == 0:
        os.close(ours)
        _end_with(lambda: _supervise(command, env, own, owner))
    os.close(owner)
    _forward_signals(supervisor)
    _, status = os.waitpid(supervisor, 0)
    # Only a supervisor that was killed leaves anything.
    signal_all(descendants(os.getpid()), signal.SIGKILL)
    try:
        return look(_exit_code(os.waitstatus_to_exitcode(status)))
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _end_with(work: Callable[[], int]) -> NoReturn:
    """End this forked process with the exit code that `work` returns."""
    status = 1
    try:
        os.setsid()
        status = work()
    except OSError as error:
        print(f"kvtax: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _supervise(
    command: Sequence[str], env: dict[str, str], own: Path, owner: int
) -> int:
    """Run the command until it has ended or `owner` is closed; leave nothing."""
    adopt_orphans()
    process = subprocess.Popen(command, env=env, preexec_fn=begin_child)
    ended: list[int] = []
    shared: set[Path] = set()

    def note_shared() -> None:
        shared.update(shared_memory(descendants(os.getpid())))

    try:
        # A signal may end the processes before stop_tree sees what they share.
        _forward_signals(process.pid, note_shared)
        ended, _, _ = select.select([owner, os.pidfd_open(process.pid)], [], [])
    finally:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        stop_tree(process)
        remove_shared_memory(shared)
        if owner in ended:
            shutil.rmtree(own, ignore_errors=True)
    return _exit_code(process.wait())


def _forward_signals(pid: int, before: Callable[[], None] = lambda: None) -> None:
    """Send signals on to `pid`, those too that came while they were blocked.

    `before` is called before each.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        before()
        signal_all([pid], number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _exit_code(status: int) -> int:
    return 128 - status if status < 0 else status
