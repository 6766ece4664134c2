# SPDX-License-Identifier: Apache-2.0
"""Lock of the machine for one measurement, and marks of supervisors.

Both are names of abstract Unix sockets: they leave nothing on disk, are seen by every
user of the machine, and vanish with the process that holds them, however it ends.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEASUREMENT = "\0kvtax-measurement"
SUPERVISOR = "\0kvtax-supervisor-"
# How often a command that waits tries again.
POLL_S = 0.5
# Characters of the owner's command that are shown.
MOST_COMMAND = 160


class MachineBusy(Exception):
    """Another measurement is running here; the two would disturb each other."""

    exit_code = 4


@contextmanager
def machine_lock(wait_s: float = 0) -> Iterator[None]:
    """Hold the machine for one measurement. Raises MachineBusy after `wait_s`."""
    until_s = time.monotonic() + wait_s
    with socket.socket(socket.AF_UNIX) as lock:
        busy = ""
        while not _is_bound(lock):
            first, busy = not busy, busy or _busy()
            if time.monotonic() >= until_s:
                raise MachineBusy(f"{busy}: wait for its end, as --wait SECONDS does")
            if first:
                print(
                    f"{busy}: waiting up to {wait_s:g} s", file=sys.stderr, flush=True
                )
            time.sleep(POLL_S)
        # Who finds the machine busy learns by this whose it is.
        lock.listen()
        yield


def _is_bound(lock: socket.socket) -> bool:
    try:
        lock.bind(MEASUREMENT)
    except OSError:
        return False
    return True


def _busy() -> str:
    return (
        f"another sweep or experiment is running on this machine{_owner()}; two would "
        "disturb each other"
    )


def _owner() -> str:
    """Name the process that holds the machine, its command and its folder."""
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.setblocking(False)
        asking.connect(MEASUREMENT)
        credentials = struct.Struct("3i")
        peer = asking.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size
        )
        pid = credentials.unpack(peer)[0]
        words = [f"process {pid}"]
        with suppress(OSError):
            words.append(_command(pid))
            # That of another user's process may not be read.
            words.append(f"in {Path(f'/proc/{pid}/cwd').readlink()}")
        return f" ({', '.join(words)})"
    return ""


def _command(pid: int) -> str:
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return f"`{line.decode(errors='backslashreplace').strip()[:MOST_COMMAND]}`"


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
