# SPDX-License-Identifier: Apache-2.0
"""Arms behind vllm-router itself: the same run, less what only our proxy records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleet.tests.experiment.small_experiment import (
    OF_THE_MACHINE,
    SMOKE,
    on_standins,
)
from kvtax.engine import ServerError, releases
from kvtax.paths import REPOSITORY

from kvtax_fleet.analyze.arm_runs import ArmRun, read_run
from kvtax_fleet.experiment.config import Arm
from kvtax_fleet.experiment.executors import RunOptions, run_experiment
from kvtax_fleet.experiment.router import RunError, started_router
from kvtax_fleet.launch import vllm_router
from kvtax_fleet.records.instances import Instance

THEIRS = """
[arms.vllm_router]
router = "vllm-router"
policy = "cache_aware"
"""
ARM = Arm("cache_aware", router="vllm-router")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke experiment with an arm behind vllm-router, on stand-ins."""
    place = tmp_path_factory.mktemp("router")
    command = [sys.executable, "-m", "kvtax", "fleet"]
    with on_standins(place, SMOKE + THEIRS) as config:
        command += [str(config), "--out", str(place / "run")]
        subprocess.run(command, cwd=REPOSITORY)
    return place / "run"


@pytest.fixture(scope="module")
def theirs(out: Path) -> ArmRun:
    (one,) = (run for run in read_run(out) if run.info.arm == "vllm_router@2")
    return one


@pytest.mark.slow
def test_it_serves_all_requests_and_the_record_says_who_did(theirs: ArmRun) -> None:
    assert theirs.info.status == "ok", theirs.info.error
    assert theirs.info.router == f"vllm-router {vllm_router.version()}"
    assert theirs.info.cache_state is None
    ids = [request.id for request in theirs.requests]
    assert len(ids) == len(set(ids)) == theirs.info.trace.requests
    assert {request.status for request in theirs.requests} == {"ok"}
    assert theirs.decisions == [] and theirs.decision_ends == []


@pytest.mark.slow
def test_its_cache_aware_knows_prompts_of_token_ids(theirs: ArmRun) -> None:
    """Else it would be compared without what it is for."""
    told = (theirs.folder / "router.prom").read_text()
    (hits,) = re.findall(r'prefix_routing.*outcome="prefix_hit"} (\d+)', told)
    turns_after_the_first = theirs.info.trace.requests - theirs.info.trace.sessions
    assert int(hits) > 0.7 * turns_after_the_first


@pytest.mark.slow
def test_it_is_compared_with_our_policies_or_only_the_machine_forbids_it(
    out: Path, theirs: ArmRun
) -> None:
    analysis = json.loads((out / "analysis.json").read_text())
    refused = {one["arm"]: one["refused"] for one in analysis["comparisons"]}
    why = refused[theirs.info.arm]
    assert all(any(what in one for what in OF_THE_MACHINE) for one in why), why
    report = (out / "report.md").read_text()
    assert f"ran behind {theirs.info.router}, which records no decisions" in report


INSTANCES = [Instance("i0", "http://127.0.0.1:9")]


def test_a_router_that_does_not_start_fails_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm-router"
    program.write_text("#!/bin/sh\necho no workers today; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(vllm_router, "executable", lambda: program)
    with (
        pytest.raises(RunError, match=r"did not start\n(?s:.*)no workers today"),
        started_router(tmp_path, ARM, INSTANCES),
    ):
        pass


def test_what_cannot_be_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(releases, "RELEASES", tmp_path / "releases")
    config = tmp_path / "routed.toml"
    config.write_text(SMOKE + THEIRS)
    what = r"vllm-router [0-9.]+ is needed.*locks/vllm-router\.txt.*uv venv failed"
    with pytest.raises(ServerError, match=what):
        run_experiment(config, RunOptions(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
