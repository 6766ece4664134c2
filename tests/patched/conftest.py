# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder run inside a patched vLLM; pytest shows them as its own.

A module says in PATCHES which patches its vLLM has, and in RELEASE which release it is
if not the one under test. If what it tests is for one release alone, it says so in
ONLY, and is skipped on others. Out here the module is read, never imported.

All selected tests of the same vLLM run in one pytest inside it (inside.py is its
plugin). The first of them starts it; each waits for the outcome of its namesake.

What cannot be read off the syntax tree is refused: no test goes unseen.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from kvtax.engine.environment import engine_environment
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.overlay import build_overlay
from kvtax.engine.preloaded import Preloaded
from kvtax.engine.server import tail
from kvtax.proc.ports import reserve
from tests.releases import INSTALLED, package_of, under_test

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
        env["KVTAX_INSIDE_RESULTS"] = str(self._results)
        plugins = ["--noconftest", "-p", "inside", "-p", "no:cacheprovider", "-m", ""]
        command = installed.command("-m", "pytest", *plugins, *options, *tests)
        self._process = Preloaded(command, env, self._log)

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


RUNS = pytest.StashKey[dict[tuple[str, ...], InsideRun]]()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    return PatchedModule.from_parent(parent, path=module_path)


def pytest_sessionfinish(session: pytest.Session) -> None:
    for run in session.stash.get(RUNS, {}).values():
        run.close()


class PatchedModule(pytest.File):
    def collect(self) -> Iterator[PatchedTest]:
        module = ast.parse(self.path.read_bytes())
        self.vllm = (
            self._value(ast.Name("RELEASE"), module, INSTALLED),
            *self._value(ast.Name("PATCHES"), module),
        )
        only = self._value(ast.Name("ONLY"), module, INSTALLED)
        self.skipped = only != INSTALLED and f"what it tests is for {only} alone"
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                raise self.CollectError(f"{node.name}: only functions are tests here")
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield from self._tests(node, module)

    def _tests(self, node: ast.FunctionDef, module: ast.Module):
        """One test per combination of parameters; ids are the values as text."""
        marks, ids = ["slow"], []
        for decorator in reversed(node.decorator_list):
            match ast.unparse(decorator).removeprefix("pytest.mark.").split("(")[0]:
                case "parametrize" if len(decorator.args) == 2:
                    ids.append([str(v) for v in self._value(decorator.args[1], module)])
                case ("long" | "serial") as mark:
                    marks.append(mark)
                case _:
                    text = ast.unparse(decorator)
                    raise self.CollectError(f"{node.name}: cannot read @{text}")
        for combination in itertools.product(*ids):
            name = f"{node.name}[{'-'.join(combination)}]" if ids else node.name
            test = PatchedTest.from_parent(self, name=name)
            for mark in marks:
                test.add_marker(mark)
            if self.skipped:
                test.add_marker(pytest.mark.skip(self.skipped))
            test.line = node.lineno - 1
            yield test

    def _value(self, node: ast.expr, module: ast.Module, default=None):
        """The value of a literal, or of a name set here or imported from beside."""
        try:
            if not isinstance(node, ast.Name):
                return ast.literal_eval(node)
            for statement in module.body:
                match statement:
                    case ast.Assign(targets=[ast.Name(id=node.id)]):
                        return ast.literal_eval(statement.value)
                    case ast.ImportFrom() if node.id in [
                        n.name for n in statement.names
                    ]:
                        return getattr(
                            importlib.import_module(statement.module), node.id
                        )
        except ValueError:
            pass
        if default is not None:
            return default
        raise self.CollectError(f"{self.path}: no literal {ast.unparse(node)}")


class PatchedTest(pytest.Item):
    line = 0

    def runtest(self) -> None:
        runs = self.session.stash.setdefault(RUNS, {})
        vllm = self.parent.vllm
        if vllm not in runs:
            for other in runs.values():
                other.wait()
            runs[vllm] = self._start(*vllm)
        try:
            outcome = runs[vllm].outcome(self.nodeid)
        except BaseException:
            # Or each of the others would wait for its own time limit.
            runs[vllm].stop()
            raise
        if outcome["outcome"] == "skipped":
            pytest.skip(outcome["text"])
        if outcome["outcome"] == "failed":
            raise FailedInsideError(outcome["text"])

    def _start(self, release: str, *patches: str) -> InsideRun:
        tests = [item for item in self.session.items if isinstance(item, PatchedTest)]
        selected = [
            test
            for test in tests
            if test.parent.vllm == (release, *patches) and not test.parent.skipped
        ]
        config = self.session.config
        return InsideRun(
            package_of(release),
            under_test() if release == INSTALLED else installation(),
            patches,
            [f"{test.path}::{test.name}" for test in selected],
            ["-c", str(config.inipath), "--rootdir", str(config.rootpath)],
        )

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, FailedInsideError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, self.line, self.name


class FailedInsideError(Exception):
    """Carries the report of the test that failed inside."""
