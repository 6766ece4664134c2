# SPDX-License-Identifier: Apache-2.0
"""The process that does a host's tasks, which come through files in a folder.

The host's agent (kvtax.hosts.agent) makes the folder and starts
`python -m MODULE FOLDER`:

    FOLDER/pipe         each line is the number of a task
    FOLDER/tasks/N      the content of the task
    FOLDER/results/N    a folder with its result, complete once it is there

If this host cannot do the work, whichever task, the process prints why and ends with
the status REFUSED.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kvtax.config import ConfigError
from kvtax.engine.errors import ServerError
from kvtax.hosts.errors import HostRefused
from kvtax.proc.lines import Lines
from kvtax.proc.machine_lock import MachineBusy
from kvtax.signals import exit_on_signals

PIPE, TASKS, RESULTS = "pipe", "tasks", "results"
# EX_UNAVAILABLE of sysexits.h
REFUSED = 69
REFUSALS = (HostRefused, ConfigError, MachineBusy, ServerError)
WATCH_EVERY_S = 1.0

# Does the task with this content, and fills this folder with the result.
DoTask = Callable[[bytes, Path], None]


class Tasks:
    """The tasks that come to the process of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = Lines(folder / PIPE)

    @property
    def open(self) -> bool:
        """False once no task can come any more."""
        return self._lines.open

    def come(self, wait_s: float) -> list[tuple[int, bytes]]:
        """Numbers and contents of tasks that came; waits up to `wait_s` for one."""
        if not self.open or not select.select([self._lines], [], [], wait_s)[0]:
            return []
        return [
            (int(line), (self._folder / TASKS / line.decode()).read_bytes())
            for line in self._lines.come()
        ]

    def done(self, number: int, result: Path) -> None:
        """Hand over the folder `result`, which must be on the same file system."""
        result.rename(self._folder / RESULTS / str(number))


def serve(prepare: Callable[[Path], AbstractContextManager[DoTask]]) -> int:
    """Do all tasks, one after the other; return the exit code.

    `prepare(FOLDER)` is entered once. All REFUSALS and errors of the preflight mean
    that the host refuses.
    """
    # It takes a second to import, and agents need this module without it.
    from kvtax.engine.preflight import CONFIG_ERRORS

    folder = Path(sys.argv[1])
    exit_on_signals()
    tasks = Tasks(folder)
    try:
        with prepare(folder) as do_task:
            while tasks.open:
                for number, content in tasks.come(WATCH_EVERY_S):
                    made = folder / "made" / str(number)
                    made.mkdir(parents=True)
                    do_task(content, made)
                    tasks.done(number, made)
    except (*REFUSALS, *CONFIG_ERRORS) as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def undo_ray_environment() -> None:
    """Undo what Ray changes for its child processes. Raises HostRefused."""
    # Ray sets it to 1 in its workers. PyTorch would have one thread.
    os.environ.pop("OMP_NUM_THREADS", None)
    if (niceness := os.nice(0)) > 0:
        raise HostRefused(
            f"Ray's workers run at niceness {niceness} there, and wait for all other "
            "processes: set RAY_worker_niceness=0 for `ray start`"
        )


def require_packages(here: dict[str, str], first_host: dict[str, str]) -> None:
    """Raise HostRefused if the packages `here` are not those of the first host."""
    for name in sorted(here.keys() | first_host.keys()):
        if here.get(name) != first_host.get(name):
            raise HostRefused(
                f"{name} is {here.get(name)} there, and {first_host.get(name)} on the "
                "first host"
            )
