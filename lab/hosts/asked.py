# SPDX-License-Identifier: Apache-2.0
"""Pieces of work that a process is asked for, through files in a folder of its own.

The agent of the host (lab.hosts.agent) makes the folder and starts the process in it:

    FOLDER/asked        a pipe: each line is the number of a task
    FOLDER/tasks/N      what is to be done
    FOLDER/results/N    a folder with what came out of it, complete once it is there

If this host cannot do the work, whichever task, the process says why and ends with the
status REFUSED.
"""

from __future__ import annotations

import select
from pathlib import Path

from lab.serving.lines import Lines

PIPE, TASKS, RESULTS = "asked", "tasks", "results"
# EX_UNAVAILABLE of sysexits.h
REFUSED = 69


class Asked:
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
