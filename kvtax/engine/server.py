# SPDX-License-Identifier: Apache-2.0
"""Starts a vLLM server from its resolved spec, and proves that it is the one."""

from __future__ import annotations

import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from kvtax.engine.errors import ServerError
from kvtax.engine.preloaded import Preloaded
from kvtax.engine.server_spec import ServerSpec
from kvtax.proc.ports import LOOPBACK, listener_pid
from kvtax.proc.supervise import Supervised

# NIXL takes 100 to 150 s to start when eight instances start at once.
READY_DEADLINE_S = 360.0


class Server:
    """One vLLM server with all its processes. Starts when made."""

    def __init__(self, spec: ServerSpec) -> None:
        self.ports = spec.ports
        self.url = f"http://{LOOPBACK}:{spec.ports.http}"
        self.log = spec.log
        self._began_s = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix="kvtax-"))
        argv = spec.private_argv(scratch / "server.yaml")
        start = Supervised if spec.starts_cold else Preloaded
        self.supervised = start(argv, spec.env, spec.log, scratch, spec.secrets)

    def wait_ready(self) -> float:
        """Return the seconds from the start to an answer. Raises ServerError."""
        while (waited_s := time.monotonic() - self._began_s) < READY_DEADLINE_S:
            if self.is_ready():
                return waited_s
            time.sleep(0.1)
        raise ServerError(
            f"vLLM not ready after {READY_DEADLINE_S:.0f} s\n{tail(self.log)}"
        )

    def is_ready(self) -> bool:
        """Return whether the server answers. Raises ServerError if it has ended."""
        if self.supervised.poll() is not None:
            raise ServerError(f"vLLM exited while starting\n{tail(self.log)}")
        if not http_ok(f"{self.url}/health"):
            return False
        self._check_is_ours()
        return True

    def _check_is_ours(self) -> None:
        owner = listener_pid(self.ports.http)
        if owner not in self.supervised.pids():
            raise ServerError(
                f"port {self.ports.http} is answered by process {owner}, "
                "not by our server"
            )

    def pss_mib(self) -> float:
        """Sum of the proportional set sizes (PSS) of all its processes, in MiB.

        Memory that it shares with other servers, and the zygote, counts in part.
        """
        return sum(_pss_kib(pid) for pid in self.supervised.pids()) / 1024

    def cpu_s(self) -> float:
        """Sum of the CPU time of all its processes, in seconds."""
        return sum(_cpu_s(pid) for pid in self.supervised.pids())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.supervised.stop()


def http_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"--- end of {log}", *text])


def _pss_kib(pid: int) -> int:
    try:
        sums = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) for line in sums.splitlines() if line.startswith("Pss:")
    )


def _cpu_s(pid: int) -> float:
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0
