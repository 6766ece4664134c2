# SPDX-License-Identifier: Apache-2.0
"""One pytest inside a patched vLLM, seen from outside."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from kvtax.engine.environment import engine_environment
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import tail
from kvtax.proc.ports import reserve
from kvtax.proc.supervise import Supervised

HERE = Path(__file__).parent
POLL_S = 0.05
# What an engine with the null model needs here on later releases.
ON_A_CPU = ("cpu_uniproc", "cpu_small_blocks")


class InsideRun:
    """Runs `tests` (each PATH::NAME) on the package `vllm`, patched.

    `installed` is the Python that does it. `options` are pytest's; what is long has
    been left out of the tests already.
    """

    def __init__(
        self,
        vllm: Path,
        installed: Installation,
        patches: Collection[str],
        tests: list[str],
        options: list[str],
    ) -> None:
        self._outcomes: dict[str, dict] = {}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._log, self._results = folder / "log", folder / "results.jsonl"
        overlay = folder / "overlay"
        build_overlay(overlay, [*patches, *ON_A_CPU], {}, installed, vllm)
        env = engine_environment(overlay, CPU_ENGINE, reserve(1)[0], installed)
        path = [env["PYTHONPATH"], HERE, HERE.parent]
        if vllm != installed.package("vllm"):
            path.append(vllm.parent)
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
        env["INSIDE_RESULTS"] = str(self._results)
        plugins = ["--noconftest", "-p", "inside", "-p", "no:cacheprovider", "-m", ""]
        command = installed.command("-m", "pytest", *plugins, *options, *tests)
        self._process = Supervised(command, env, self._log)

    def outcome(self, test: str) -> dict[str, str]:
        """Waits until that test (a node id) has ended; its outcome and report.

        If the run ended before the test did, it has failed, with the end of the log.
        """
        while test not in self._outcomes:
            ended = self._process.poll() is not None
            lines = self._results.read_text() if self._results.exists() else ""
            for line in lines[: lines.rfind("\n") + 1].splitlines():
                self._outcomes |= json.loads(line)
            if ended and test not in self._outcomes:
                return {"outcome": "failed", "text": tail(self._log, 60)}
            time.sleep(POLL_S)
        return self._outcomes[test]

    def wait(self) -> None:
        self._process.wait(None)

    def stop(self) -> None:
        self._process.stop()

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()
