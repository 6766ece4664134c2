# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this host alone, for as long as a cost needs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.paths import REPOSITORY
from lab.serving.ports import reserve
from lab.serving.server import tail

READY_S = 60


@contextmanager
def ray_here() -> Iterator[str]:
    """Its address. Started as docs/hosts.md says; it ends with us, however we end."""
    with tempfile.TemporaryDirectory(prefix="kvh", ignore_cleanup_errors=True) as made:
        address = f"127.0.0.1:{reserve(1)[0].http}"
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "RAY_worker_niceness": "0"}
        # Not a `Supervised`: a sweep refuses to start beside what others supervise.
        with (Path(made) / "log").open("wb") as log:
            process = subprocess.Popen(
                _head(address, made), env=env, stdout=log, stderr=log
            )
        try:
            _wait_for(address, process, Path(log.name))
            yield address
        finally:
            process.terminate()
            process.wait()


def _head(address: str, folder: str) -> list[str]:
    host, _, port = address.rpartition(":")
    command = ["setpriv", "--pdeathsig", "TERM"]
    command += [str(Path(sys.executable).with_name("ray")), "start", "--head"]
    command += [f"--port={port}", f"--node-ip-address={host}", "--disable-usage-stats"]
    command += ["--block", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    # Else Ray keeps 10002 to 19999 for them, and refuses any other use of these.
    return [*command, "--min-worker-port=0", "--max-worker-port=0"]


def _wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + READY_S
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port))).close()
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"no Ray at {address} within {READY_S} s:\n{tail(log)}")
        time.sleep(0.2)
