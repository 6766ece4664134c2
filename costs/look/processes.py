# SPDX-License-Identifier: Apache-2.0
"""What a command takes, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    wall_s: float
    cpu_s: float
    peak_mib: float

    @property
    def cells(self) -> str:
        """As cells of a Markdown table."""
        return f"{self.wall_s:.1f} | {self.cpu_s:.1f} | {self.peak_mib:,.0f}"


def taken_by(module: str, *arguments: str) -> Taken:
    """Run python -m `module`; SystemExit if it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL
    )
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{module} exits {process.returncode}")
    wall_s = time.perf_counter() - started
    return Taken(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
