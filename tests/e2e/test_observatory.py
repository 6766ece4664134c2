# SPDX-License-Identifier: Apache-2.0
"""A real engine, held at the levels of an axis, shows a cost where it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lab.paths import REPOSITORY
from lab.records.documents import read_document
from lab.records.observatory_cell import CellRecord
from observatory.fit import growth
from observatory.gate import NOT_STARTED

pytestmark = pytest.mark.e2e

HONEST = "from connectors.noop import NoopConnector as Mine\n"
# 5 us per running request, and per run of neighbours among a new request's blocks.
BROKEN = """
import time
from itertools import pairwise
from connectors.noop import NoopConnector

def take(us):
    until = time.perf_counter() + 1e-6 * us
    while time.perf_counter() < until:
        pass

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        take(5 * len(scheduler_output.num_scheduled_tokens))
        return super().build_connector_meta(scheduler_output)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        ids = blocks.get_block_ids()[0]
        take(5 * (1 + sum(after != before + 1 for before, after in pairwise(ids))))
"""
LIMITS = '[axes.running]\norder = { connector = "constant" }\n'
META = "scheduler.build_connector_meta_us"
ALLOCATED = "scheduler.update_state_after_alloc_us"


def gate(folder: Path, code: str, *options: object) -> subprocess.CompletedProcess:
    (folder / "mine.py").write_text(code)
    command = [sys.executable, "-m", "observatory.gate", "--connector", "mine:Mine"]
    return subprocess.run(
        [*command, *map(str, options)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """(what the gate did, the cell) of a connector that grows with running requests."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "limits.toml").write_text(LIMITS)
    cell = folder / "cell.json"
    told = ["--limits", folder / "limits.toml", "--out", cell]
    run = gate(folder, BROKEN, *told, "--junit", folder / "junit.xml")
    assert cell.exists(), run.stderr
    assert "<failure" in (folder / "junit.xml").read_text()
    return run, read_document(cell, CellRecord)


def test_the_growth_is_found_along_its_axis_with_its_slope_and_no_other(broken):
    _, cell = broken
    running = growth(cell, "running", META)
    assert running.order == "linear"
    assert running.slope.ci95[0] <= 5.3
    assert running.slope.ci95[1] >= 5.0
    orders = {axis: growth(cell, axis, META).order for axis in ("cache", "context")}
    assert "linear" not in orders.values()


def test_an_arriving_request_lies_in_as_many_fragments_as_the_level_says(broken):
    _, cell = broken
    found = growth(cell, "fragments", ALLOCATED)
    assert found.order == "linear"
    assert found.slope.ci95[0] <= 5.2
    assert found.slope.ci95[1] >= 4.9
    # Whoever looks at each step of the request, not at its blocks, does not grow.
    assert growth(cell, "fragments", META).order == "constant"


def test_the_gate_ends_with_1_and_names_what_grew_along_what(broken):
    run, _ = broken
    assert run.returncode == 1, run.stderr
    assert "growth of connector along running" in run.stdout


def test_a_connector_that_does_not_start_is_told_with_its_reason(tmp_path):
    run = gate(tmp_path, "")
    assert run.returncode == NOT_STARTED
    assert "Mine not found in mine" in run.stderr


@pytest.mark.long
def test_the_example_workflow_passes_what_is_honest_and_names_what_got_worse(tmp_path):
    workflow = yaml.safe_load((REPOSITORY / "observatory/workflow.yml").read_text())
    (measure,) = [
        step for step in workflow["jobs"]["gate"]["steps"] if "setup.sh" in str(step)
    ]
    # The release that is installed.
    script = measure["run"].replace('--vllm "$VLLM"', "")
    (tmp_path / "kvtax").symlink_to(REPOSITORY)
    (tmp_path / "limits.toml").write_text(LIMITS)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    told = workflow["env"] | {"CONNECTOR": "mine:Mine", "PYTHONPATH": str(tmp_path)}

    def step() -> subprocess.CompletedProcess:
        # As GitHub runs it; `..` of the link is the repository of the connector.
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script.replace("../", f"{tmp_path}/")],
            cwd=REPOSITORY,
            env=os.environ | told,
            capture_output=True,
            text=True,
        )

    (tmp_path / "mine.py").write_text(HONEST)
    honest = step()
    assert honest.returncode == 0, honest.stderr
    (tmp_path / "after.json").rename(tmp_path / "before.json")
    (tmp_path / "mine.py").write_text(BROKEN)
    worse = step()
    assert worse.returncode == 1
    report = (tmp_path / "report.md").read_text()
    assert "slope of scheduler.build_connector_meta along running, since" in report
