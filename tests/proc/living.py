# SPDX-License-Identifier: Apache-2.0
"""Whether processes live, and what they wrote by then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def content(file: Path) -> str:
    eventually(lambda: file.exists() and file.read_text() != "")
    return file.read_text()


def eventually(condition: Callable[[], object], deadline_s: float = 120.0) -> None:
    """Return once the condition holds; the deadline is for what never happens."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process has not ended; one that only waits to be reaped has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # also where it ends while it is read
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def gone(processes: Iterable[int]) -> bool:
    return not any(alive(pid) for pid in processes)
