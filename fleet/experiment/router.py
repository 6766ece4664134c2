# SPDX-License-Identifier: Apache-2.0
"""What stands between the replayer and the instances: our proxy, or another router."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.experiment.config import Arm
from fleet.experiment.fleets import INDEXES, Fleet
from lab.records.arm import OUR_PROXY
from lab.serving import vllm_router
from lab.serving.kvindexd import kvindexd
from lab.serving.ports import reserve
from lab.serving.server import http_ok, tail
from lab.serving.supervise import Supervised

READY_DEADLINE_S = 60.0


class RunError(Exception):
    """A run came to nothing; the message says why."""


@dataclass(frozen=True)
class Router:
    """One that runs. `keeps`: the file of what it says at `told_at` after the run."""

    process: Supervised
    log: Path
    url: str
    told_at: str
    keeps: str

    def check_alive(self) -> None:
        """Raises RunError if it has ended."""
        if self.process.poll() is not None:
            raise RunError(f"the router ended under load\n{tail(self.log)}")


@contextmanager
def started_router(folder: Path, arm: Arm, fleet: Fleet) -> Iterator[Router]:
    """The arm's router before the fleet, whose instances.json is in `folder`.

    Raises RunError, PortsError, ServerError.
    """
    own, metrics = reserve(2)
    url = f"http://{fleet.address}:{own.http}"
    with ExitStack() as stack:
        if arm.router == OUR_PROXY:
            log, told_at, keeps = "proxy.log", f"{url}/breakdown", "breakdown.json"
            command = _proxy(folder, arm, fleet, own.http)
            if program := INDEXES.get(arm.cache_state):
                file = folder / "instances.json"
                log_file = folder / f"{program.name}.log"
                index = kvindexd(file, log_file, program=program)
                command += ["--kvindexd", stack.enter_context(index)]
        else:
            log, keeps = "router.log", "router.prom"
            told_at = f"http://127.0.0.1:{metrics.http}/metrics"
            command = _vllm_router(arm, fleet, own.http, metrics.http)
        process = stack.enter_context(
            Supervised(command, dict(os.environ), folder / log)
        )
        router = Router(process, folder / log, url, told_at, keeps)
        _await(router)
        yield router


def _await(router: Router) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    while not http_ok(f"{router.url}/health"):
        if router.process.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"the router did not start\n{tail(router.log)}")
        time.sleep(0.1)


def _proxy(folder: Path, arm: Arm, fleet: Fleet, port: int) -> list[str]:
    command = module_command("fleet.proxy", "--instances", folder / "instances.json")
    command += ["--policy", arm.policy, "--host", fleet.address, "--port", str(port)]
    command += ["--log", str(folder / "decisions.jsonl")]
    if fleet.cache_tokens is not None:
        command += ["--mirror-tokens", str(fleet.cache_tokens)]
    given = arm.parameters.items()
    return [*command, "--parameters", *(f"{name}={value}" for name, value in given)]


def _vllm_router(arm: Arm, fleet: Fleet, port: int, metrics_port: int) -> list[str]:
    """With its defaults but for addresses, and how often it looks for instances."""
    command = [str(vllm_router.executable()), "--policy", arm.policy]
    command += ["--worker-urls", *(one.url for one in fleet.instances)]
    command += ["--worker-startup-check-interval", "1", "--log-level", "warning"]
    command += ["--host", fleet.address, "--port", str(port)]
    return [*command, "--prometheus-port", str(metrics_port)]


def module_command(name: str, *arguments: object) -> list[str]:
    """What runs one of our modules."""
    return [sys.executable, "-m", name, *map(str, arguments)]
