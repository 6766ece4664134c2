# SPDX-License-Identifier: Apache-2.0
"""Whether processes live, and what they wrote by then."""

from __future__ import annotations

import time
from pathlib import Path


def content(file: Path) -> str:
    eventually(lambda: file.exists() and file.read_text() != "")
    return file.read_text()


def eventually(condition, deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(processes: list[int]) -> bool:
    return not any(alive(pid) for pid in processes)
