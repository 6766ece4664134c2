# SPDX-License-Identifier: Apache-2.0
"""Lock of the machine for one measurement, and marks of supervisors.

Both are names of abstract Unix sockets: they leave nothing on disk, are seen by every
user of the machine, and vanish with the process that holds them, however it ends.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEASUREMENT = "\0kvtax-measurement"
SUPERVISOR = "\0kvtax-supervisor-"


class MachineBusy(Exception):
    """Another measurement is running here; the two would disturb each other."""

    exit_code = 3


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the machine for one measurement. Raises MachineBusy."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(MEASUREMENT)
        except OSError:
            raise MachineBusy(
                "another sweep or experiment is running on this machine; two would "
                "disturb each other: wait for its end"
            ) from None
        yield


def announce_supervisor() -> socket.socket:
    """Make this process known as a supervisor, until the socket is closed."""
    name = socket.socket(socket.AF_UNIX)
    name.bind(f"{SUPERVISOR}{os.getpid()}")
    return name


def supervisors() -> set[int]:
    """Process ids of all supervisors on this machine."""
    names = Path("/proc/net/unix").read_text()
    pattern = re.escape(SUPERVISOR.replace("\0", "@")) + r"(\d+)$"
    return {int(pid) for pid in re.findall(pattern, names, re.MULTILINE)}
