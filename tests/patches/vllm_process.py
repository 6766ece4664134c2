# SPDX-License-Identifier: Apache-2.0
"""Starts a script of this folder on the installed vLLM, patched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from kvtax.engine.environment import engine_environment, record_steps
from kvtax.engine.null_model import null_checkpoint
from kvtax.engine.overlay import build_overlay
from kvtax.engine.ports import reserve
from kvtax.engine.server import tail
from kvtax.engine.settings import CPU_ENGINE
from kvtax.engine.supervise import Supervised
from tests.releases import under_test

DEADLINE_S = 900
# What an engine with the null model needs here on later releases.
ON_A_CPU = ("cpu_uniproc", "cpu_small_blocks")


class ScriptProcess:
    """One run of `script(model, result, *arguments)` in a folder of its own.

    `records` is where step records go; without `recording` there are none.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        patches: list[str],
        *arguments: str,
        recording: bool = True,
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir()
        self.log = folder / "log"
        self._result = folder / "result.json"
        model = null_checkpoint(folder / "model")
        installed = under_test()
        overlay = folder / "overlay"
        build_overlay(overlay, [*patches, *ON_A_CPU], {}, installed)
        env = engine_environment(overlay, CPU_ENGINE, reserve(1)[0], installed)
        if recording:
            env |= record_steps(self.records, {"test": 1})
        path = Path(__file__).with_name(script)
        arguments = (str(path), str(model), str(self._result), *arguments)
        command = installed.command(*arguments)
        self.process = Supervised(command, env, self.log)

    def result(self) -> dict:
        """The script's result file. Fails unless the script ends well."""
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{tail(self.log)}") from None
        assert status == 0, tail(self.log, 60)
        return json.loads(self._result.read_text())

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.stop()
