# SPDX-License-Identifier: Apache-2.0
"""The plugin of the pytest inside a patched vLLM, which conftest.py starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kvtax.engine.null_model import null_checkpoint

WORST_FIRST = ("failed", "skipped", "passed")

_phases: dict[str, list[pytest.TestReport]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome of each test that has ended: {test: {outcome, text}}."""
    phases = _phases.setdefault(report.nodeid, [])
    phases.append(report)
    if report.when != "teardown":
        return
    worst = min(phases, key=lambda phase: WORST_FIRST.index(phase.outcome))
    text = worst.longreprtext
    if worst.skipped:
        text = worst.longrepr[2]
    for title, output in report.sections:
        text += f"\n--- {title} ---\n{output}"
    outcome = {report.nodeid: {"outcome": worst.outcome, "text": text}}
    with open(os.environ["KVTAX_INSIDE_RESULTS"], "a") as file:
        file.write(json.dumps(outcome) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End at once: workers are not shut down, and their threads may wait for ever."""
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A null model that costs no time."""
    return null_checkpoint(tmp_path_factory.mktemp("model") / "null")


@pytest.fixture
def ledger_module():
    from connectors.direct_read import ledger

    return ledger


@pytest.fixture(scope="session")
def mooncake_engine(model: Path):
    """The engine that all Worlds of mooncake_world share."""
    from mooncake_world import MooncakeEngine

    return MooncakeEngine(model)
