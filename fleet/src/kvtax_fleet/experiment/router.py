# SPDX-License-Identifier: Apache-2.0
"""The router between replayer and instances: our proxy, or vllm-router."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtax.engine.server import http_ok, tail
from kvtax.proc.ports import LOOPBACK, reserve
from kvtax.proc.supervise import Supervised
from kvtax.records.files import write_document
from msgspec.structs import replace

from kvtax_fleet.experiment.config import INDEXES, Arm, proxy_settings
from kvtax_fleet.launch import vllm_router
from kvtax_fleet.launch.kvindexd import kvindexd
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.arm import OUR_PROXY
from kvtax_fleet.records.instances import Instance

READY_DEADLINE_S = 60.0


class RunError(Exception):
    """A run came to nothing; the message says why."""

    exit_code = 3


@dataclass(frozen=True)
class Router:
    """A running router. Its report after the run, at a URL, is kept in a file."""

    process: Supervised
    log: Path
    url: str
    report_url: str
    report_file: str

    def check_alive(self) -> None:
        """Raise RunError if it has ended."""
        if self.process.poll() is not None:
            raise RunError(f"the router ended under load\n{tail(self.log)}")


@contextmanager
def started_router(
    folder: Path, arm: Arm, instances: Sequence[Instance]
) -> Iterator[Router]:
    """Start the arm's router; instances.json is in `folder`.

    Raises RunError, PortsError, ServerError.
    """
    own, metrics = reserve(2)
    url = f"http://{LOOPBACK}:{own.http}"
    with ExitStack() as stack:
        if arm.router == OUR_PROXY:
            log, report_file = "proxy.log", "breakdown.json"
            report_url = f"http://{LOOPBACK}:{metrics.http}/breakdown"
            # It is stopped after the last answer, or because a run has failed.
            settings = replace(proxy_settings(arm, instances), drain_timeout_s=0.0)
            if arm.cache_state in INDEXES:
                program = INDEXES[arm.cache_state]
                file = folder / "instances.json"
                log_file = folder / f"{program.name}.log"
                index = kvindexd(file, log_file, program=program)
                address = stack.enter_context(index)
                settings = replace(settings, cache="exact", kvindexd=address)
            command = _proxy(folder, settings, own.http, metrics.http)
        else:
            log, report_file = "router.log", "router.prom"
            report_url = f"http://{LOOPBACK}:{metrics.http}/metrics"
            command = _vllm_router(arm, instances, own.http, metrics.http)
        process = stack.enter_context(
            Supervised(command, dict(os.environ), folder / log)
        )
        router = Router(process, folder / log, url, report_url, report_file)
        _await(router)
        yield router


def _await(router: Router) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    while not http_ok(f"{router.url}/health"):
        if router.process.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"the router did not start\n{tail(router.log)}")
        time.sleep(0.1)


def _proxy(folder: Path, settings: Settings, port: int, control: int) -> list[str]:
    """Write the settings; return the command of a proxy that reads them."""
    file = folder / "proxy.json"
    write_document(file, settings)
    command = [sys.executable, "-m", "kvtax", "proxy", "--settings", str(file)]
    command += ["--instances", str(folder / "instances.json")]
    command += ["--host", LOOPBACK, "--port", str(port)]
    command += ["--control-port", str(control)]
    return [*command, "--log", str(folder / "decisions.jsonl")]


def _vllm_router(
    arm: Arm, instances: Sequence[Instance], port: int, metrics_port: int
) -> list[str]:
    """Make a command with vllm-router's defaults, except for addresses and polling."""
    command = [str(vllm_router.executable()), "--policy", arm.policy]
    command += ["--worker-urls", *(each.url for each in instances)]
    command += ["--worker-startup-check-interval", "1", "--log-level", "warning"]
    command += ["--host", LOOPBACK, "--port", str(port)]
    return [*command, "--prometheus-port", str(metrics_port)]
