# SPDX-License-Identifier: Apache-2.0
"""Aborts and failures of Mooncake transfers, on any vLLM as it is or patched.

One engine with the null model pulls from itself: scheduler, both halves of the
connector, ZMQ and the transfer engine are vLLM's own, and a test takes every step. A
scenario (tests/patched/abort_lab.py) passes if the engine lives, each request has ended
as it should, and each block is back; a storm aborts pairs at random stages.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from kvtax.engine import ServerError
from kvtax.engine.engine_process import WorkerProcess
from kvtax.engine.environment import engine_environment
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import CPU_ENGINE, null_checkpoint
from kvtax.engine.overlay import build_overlay
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve

PATCH = "kv_transfer_abort_race"
LAB = REPOSITORY / "tests" / "patched"
PATIENCE_S = 30.0
# Beyond a scenario's patience, which it may lose several times, until it hangs.
HANGS_S = 600.0

# By scenario, the problems in words.
Outcomes = dict[str, list[str]]


class Lab:
    """The engine that runs scenarios; an engine that ended or hangs is replaced."""

    def __init__(
        self, installed: Installation, patches: list[str], folder: Path
    ) -> None:
        self._installed, self._folder = installed, folder
        overlay = folder / "overlay"
        build_overlay(overlay, patches, {}, installed)
        self._arguments = "abort_lab", str(null_checkpoint(folder / "model"))
        self._env = engine_environment(overlay, CPU_ENGINE, reserve(1)[0], installed)
        path = [self._env["PYTHONPATH"], str(LAB)]
        self._env["PYTHONPATH"] = os.pathsep.join(path)
        self._stack = ExitStack()
        self._process: WorkerProcess | None = None
        self._started = 0

    def _running(self) -> WorkerProcess:
        if self._process is None:
            folder = self._folder / str(self._started)
            self._started += 1
            worker = WorkerProcess(
                folder, *self._arguments, env=self._env, installed=self._installed
            )
            self._process = self._stack.enter_context(worker)
            self._process.wait_ready()
        return self._process

    def names(self) -> list[str]:
        """List the scenarios. Raises ServerError if this vLLM does not start."""
        names: list[str] = self._running().ask("names")
        return names

    def problems(self, scenario: str) -> list[str]:
        """Run a scenario. Raises ServerError if the engine does not start again."""
        process = self._running()
        try:
            request = "problems_of", scenario, PATIENCE_S
            problems: list[str] = process.ask(*request, timeout_s=HANGS_S)
        except ServerError as error:
            self.close()
            return [str(error)]
        return problems

    def close(self) -> None:
        """End the engine."""
        self._stack.close()
        self._process = None


def run_scenarios(installed: Installation, patches: list[str]) -> Outcomes:
    """Run all scenarios and storms. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="kvtax-abort-") as folder:
        lab = Lab(installed, patches, Path(folder))
        try:
            return {name: lab.problems(name) for name in lab.names()}
        finally:
            lab.close()
