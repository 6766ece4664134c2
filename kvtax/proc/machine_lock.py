# SPDX-License-Identifier: Apache-2.0
"""Lock of the machine for one measurement of this user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvtax.proc.user_files import LockHeld, user_lock

MEASUREMENT = "kvtax-measurement.lock"
# Characters of the owner's command that are shown.
MOST_COMMAND = 160


class MachineBusy(Exception):
    """Another measurement is running here; the two would disturb each other."""

    exit_code = 4


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the machine for one measurement. Raises MachineBusy.

    The lock is this user's, so that no other user can keep it for ever.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(user_lock(MEASUREMENT))
        except LockHeld as error:
            raise MachineBusy(_busy(error.pid)) from None
        yield


def _busy(pid: int) -> str:
    words = [f"process {pid}"]
    with suppress(OSError):
        words += [_command(pid), f"in {_printable(_folder(pid))}"]
    return (
        "another sweep or experiment is running on this machine "
        f"({', '.join(words)}); two would disturb each other: wait for its end"
    )


def _command(pid: int) -> str:
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    text = line.decode(errors="backslashreplace").strip()
    return f"`{_printable(text[:MOST_COMMAND])}`"


def _folder(pid: int) -> str:
    return str(Path(f"/proc/{pid}/cwd").readlink())


def _printable(text: str) -> str:
    """Replace what a terminal would obey."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
