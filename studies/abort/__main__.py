# SPDX-License-Identifier: Apache-2.0
"""Aborts and failures of Mooncake transfers, on any vLLM as it is.

For whoever reviews a change to the connector. One engine with the null model pulls from
itself: scheduler, both halves of the connector, ZMQ and the transfer engine are vLLM's
own, and a test takes every step. A scenario passes if the engine lives, each request
has ended as it should, and each block is back; a storm aborts pairs at random stages.
Prints Markdown and writes it with JSON. Exits with 1 if a scenario did not pass.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvtax.engine import ServerError
from kvtax.engine.engine_process import WorkerProcess
from kvtax.engine.environment import engine_environment
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE, null_checkpoint
from kvtax.engine.overlay import build_overlay
from kvtax.engine.releases import on_sources, release
from kvtax.patcher import Tree
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from studies.harness import main, publish, rows_table

RELEASE = "0.32.0"
LAB = REPOSITORY / "tests" / "patched"
# What an engine with the null model needs on a CPU.
PATCHES = ["mooncake_cpu_layout", "cpu_uniproc", "cpu_small_blocks"]
PATIENCE_S = 30.0
# Beyond a scenario's patience, which it may lose several times, until it hangs.
HANGS_S = 600.0
# Characters of a problem in the table.
LONGEST = 100


class Outcome(msgspec.Struct):
    """One scenario and what went wrong in it, in words."""

    scenario: str
    problems: list[str]

    @property
    def name(self) -> str:
        """The scenario's name in words."""
        return self.scenario.replace("_", " ")

    @property
    def word(self) -> str:
        """The outcome in one word."""
        return "failed" if self.problems else "passed"

    @property
    def problem(self) -> str:
        """The first problem, short enough for a cell: of a traceback, its last line."""
        if not self.problems:
            return ""
        line = self.problems[0].strip().splitlines()[-1].replace("|", "\\|")
        return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


class Lab:
    """The engine that runs scenarios; one that ended or hangs is replaced."""

    def __init__(self, installed: Installation, folder: Path) -> None:
        self._installed, self._folder = installed, folder
        overlay = folder / "overlay"
        self.patch_hashes = build_overlay(overlay, PATCHES, {}, installed)
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
        return self._running().ask("names")

    def outcome(self, scenario: str, patience_s: float) -> Outcome:
        """Run a scenario. Raises ServerError if the engine does not start again."""
        process = self._running()
        try:
            request = "problems_of", scenario, patience_s
            return Outcome(scenario, process.ask(*request, timeout_s=HANGS_S))
        except ServerError as error:
            self.close()
            return Outcome(scenario, [str(error)])

    def close(self) -> None:
        """End the engine."""
        self._stack.close()
        self._process = None


COLUMNS = {
    "scenario": "{row.name}",
    "outcome": "{row.word}",
    "the first problem": "{row.problem}",
}


def report(version: str, outcomes: list[Outcome], patience_s: float) -> list[str]:
    """Return the parts of the page."""
    passed = sum(not outcome.problems for outcome in outcomes)
    return [
        f"vLLM {version} as it is: {passed} of {len(outcomes)} passed. A request "
        f"that is `still there` had not ended within {patience_s:.0f} s of the "
        "failure; here `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT` is 300 s, and may end it "
        "later.",
        rows_table(outcomes, COLUMNS),
    ]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.abort`."""
    parser.add_argument(
        "--vllm",
        metavar="PATH",
        default=RELEASE,
        help="a checkout or source release of vLLM, or a release that is installed "
        f"(default {RELEASE}, whose compiled parts and packages a PATH uses)",
    )
    parser.add_argument(
        "--python", help=f"whose compiled parts a PATH uses (default: {RELEASE}'s)"
    )
    parser.add_argument(
        "--scenario", action="append", help="this one alone; may be repeated"
    )
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds until stuck"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/abort.md"))


def run(arguments: argparse.Namespace) -> int:
    """Run the scenarios, print the result and return the exit code."""
    sources = Path(arguments.vllm)
    is_path = (sources / "vllm" / "__init__.py").exists()
    name = RELEASE if is_path else arguments.vllm
    installed = installation(arguments.python) if arguments.python else release(name)
    with tempfile.TemporaryDirectory(prefix="kvtax-abort-") as temporary:
        folder = Path(temporary)
        if is_path:
            installed = on_sources(sources, installed, folder / "sources")
        vllm = installed.package("vllm")
        version = Tree(vllm).version or "of unknown version"
        lab = Lab(installed, folder)
        try:
            names = arguments.scenario or lab.names()
            outcomes = [lab.outcome(name, arguments.patience) for name in names]
        finally:
            lab.close()
    parts = report(version, outcomes, arguments.patience)
    results = {"vllm": version, "outcomes": outcomes}
    publish("abort", arguments.out, parts, results, lab.patch_hashes, installed)
    return int(any(outcome.problems for outcome in outcomes))


def figure(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    return rows_table(msgspec.convert(result["outcomes"], list[Outcome]), COLUMNS)


if __name__ == "__main__":
    main("abort", __doc__, configure, run)
