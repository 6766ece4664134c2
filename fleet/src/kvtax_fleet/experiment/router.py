# SPDX-License-Identifier: Apache-2.0
"""The proxy between replayer and instances, as a process of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtax.engine.server import http_ok, tail
from kvtax.proc.ports import LOOPBACK, reserve
from kvtax.proc.supervise import Supervised
from kvtax.records.files import write_document

from kvtax_fleet.experiment.config import Arm, proxy_settings
from kvtax_fleet.records.instances import Instance

READY_DEADLINE_S = 60.0


class RunError(Exception):
    """A run came to nothing; the message says why."""

    exit_code = 3


@dataclass(frozen=True)
class Router:
    """A running proxy, and the URL of its state."""

    process: Supervised
    log: Path
    url: str
    breakdown_url: str

    def check_alive(self) -> None:
        """Raise RunError if it has ended."""
        if self.process.poll() is not None:
            raise RunError(f"the proxy ended under load\n{tail(self.log)}")


@contextmanager
def started_router(
    folder: Path, arm: Arm, instances: Sequence[Instance]
) -> Iterator[Router]:
    """Start the arm's proxy; instances.json is in `folder`.

    Raises RunError, PortsError.
    """
    own, control = reserve(2)
    settings = proxy_settings(arm, instances)
    write_document(folder / "proxy.json", settings)
    command = [sys.executable, "-m", "kvtax", "proxy"]
    command += ["--settings", str(folder / "proxy.json")]
    command += ["--instances", str(folder / "instances.json")]
    command += ["--host", LOOPBACK, "--port", str(own.http)]
    command += ["--control-port", str(control.http)]
    command += ["--log", str(folder / "decisions.jsonl")]
    log = folder / "proxy.log"
    with Supervised(command, dict(os.environ), log) as process:
        url = f"http://{LOOPBACK}:{own.http}"
        breakdown_url = f"http://{LOOPBACK}:{control.http}/breakdown"
        router = Router(process, log, url, breakdown_url)
        _await(router)
        yield router


def _await(router: Router) -> None:
    """Wait until the proxy answers. Raises RunError."""
    deadline = time.monotonic() + READY_DEADLINE_S
    while not http_ok(f"{router.url}/health"):
        if router.process.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"the proxy did not start\n{tail(router.log)}")
        time.sleep(0.1)
