# SPDX-License-Identifier: Apache-2.0
"""Sample where the CPU time of a server goes, with py-spy, for speedscope."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvtax.engine.server import Server, tail
from kvtax.proc.supervise import Supervised

FILE = "cpu.speedscope.json"
SECONDS = 20
# What py-spy takes to begin, and to write its file.
GRACE_S = 60.0
HOW_TO_OPEN = "open it with https://www.speedscope.app, which reads it in your browser"


class SamplingError(Exception):
    """The server could not be sampled; the message says why."""


class Sampler(Supervised):
    """py-spy on all processes of a server, for SECONDS."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._file, self._py_spy_log = folder / FILE, folder / "py-spy.log"
        command = [str(Path(sys.executable).with_name("py-spy")), "record"]
        command += ["--pid", str(server.supervised.supervisor_pid), "--subprocesses"]
        command += ["--duration", str(SECONDS), "--threads", "--function"]
        command += ["--format", "speedscope", "--output", str(self._file)]
        super().__init__(command, dict(os.environ), self._py_spy_log)

    def finish(self) -> None:
        """Wait until the file is written. Raises SamplingError."""
        try:
            status = self.wait(SECONDS + GRACE_S)
        except subprocess.TimeoutExpired:
            raise SamplingError(
                f"py-spy did not end\n{tail(self._py_spy_log)}"
            ) from None
        if status or not self._file.exists():
            raise SamplingError(
                "py-spy cannot sample the server: run as its user, or as root where "
                f"ptrace is restricted\n{tail(self._py_spy_log)}"
            )
