# SPDX-License-Identifier: Apache-2.0
"""Whole experiments on stand-ins: killed, resumed, and with an instance left warm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleet.tests.experiment.small_experiment import (
    OF_THE_MACHINE,
    SMOKE,
    smoke_of,
)
from kvtax.cli import Exit, main
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import descendants
from tests.proc.living import eventually, gone

from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.experiment.config import read_experiment
from kvtax_fleet.experiment.experiment_plan import plan

pytestmark = pytest.mark.slow

DEADLINE_S = 300.0


def command(config: Path, out: Path, *options: str) -> list[str]:
    module = [sys.executable, "-m", "fleet.tests.experiment.small_experiment"]
    return [*module, str(config), "--out", str(out), *options]


def written(folder: Path, text: str) -> Path:
    config = folder / "experiment.toml"
    config.write_text(text)
    return config


def run(
    config: Path, out: Path, *options: str, **env: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(config, out, *options),
        cwd=REPOSITORY,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """(config, folder, arm.json of the run that had ended before, then, result)."""
    folder = tmp_path_factory.mktemp("experiment")
    out = folder / "run"
    config = written(folder, SMOKE)
    first = out / plan(read_experiment(config))[0].name / "arm.json"
    with subprocess.Popen(command(config, out), cwd=REPOSITORY) as experiment:
        eventually(first.exists, DEADLINE_S)
        # The second run has begun: a proxy, or a replayer too.
        eventually(lambda: descendants(experiment.pid), DEADLINE_S)
        processes = descendants(experiment.pid)
        os.kill(experiment.pid, signal.SIGKILL)
    eventually(lambda: gone(processes))
    before = first.stat().st_mtime_ns, first.read_bytes()
    yield config, out, first, before, run(config, out, "--resume")


def test_nothing_outlives_a_killed_experiment_and_resume_ends_it(killed_and_resumed):
    config, out, first, before, result = killed_and_resumed
    assert (first.stat().st_mtime_ns, first.read_bytes()) == before
    runs = read_run(out)
    planned = {run.name for run in plan(read_experiment(config))}
    assert {str(run.folder.relative_to(out)) for run in runs} == planned
    assert {run.info.status for run in runs} == {"ok"}, result.stdout
    assert not (out / "workshop").exists()


def test_all_arms_serve_the_same_requests_each_exactly_once(killed_and_resumed):
    _, out, *_ = killed_and_resumed
    for each in read_run(out):
        ids = [request.id for request in each.requests]
        assert len(ids) == len(set(ids)) == each.info.trace.requests
        assert {request.status for request in each.requests} == {"ok"}
        assert {decision.id for decision in each.decisions} == set(ids)
        assert each.info.freshness.fresh
        assert set(each.counters) == {"i0", "i1"}


def test_what_the_proxy_says_after_the_last_request_is_kept(killed_and_resumed):
    _, out, *_ = killed_and_resumed
    for each in read_run(out):
        said = json.loads((each.folder / "breakdown.json").read_text())
        ended = [instance["ended"]["ok"] for instance in said["instances"].values()]
        assert sum(ended) == each.info.trace.requests


def test_the_report_compares_or_says_why_not(killed_and_resumed):
    _, out, _, _, result = killed_and_resumed
    analysis = json.loads((out / "analysis.json").read_text())
    refused = [why for each in analysis["comparisons"] for why in each["refused"]]
    assert all(any(what in why for what in OF_THE_MACHINE) for why in refused), refused
    assert result.returncode == (3 if refused else 0), result.stdout + result.stderr
    assert (out / "report.md").exists()


def test_a_folder_with_another_experiment_is_left_alone(
    killed_and_resumed, tmp_path, capsys, signals
):
    config, out, *_ = killed_and_resumed
    before = contents(out)
    other = tmp_path / "other.toml"
    other.write_text(config.read_text().replace("max_turns = 3", "max_turns = 2"))
    for experiment, options, why in (
        (config, [], "--resume"),
        (other, [], "--resume"),
        (other, ["--resume"], "cannot resume"),
    ):
        command = ["fleet", str(experiment), "--out", str(out), *options]
        assert main(command) == Exit.BAD_INPUT
        assert why in capsys.readouterr().err
    assert contents(out) == before


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """When each file was last written, and what is in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_an_instance_that_was_left_warm_is_caught(tmp_path):
    """The reference study's -44 % E2E."""
    config = written(tmp_path, smoke_of(arms=1))
    result = run(config, tmp_path / "run", WARM="1")
    assert result.returncode == 3
    (caught,) = read_run(tmp_path / "run")
    assert caught.info.status == "failed"
    assert not caught.info.freshness.fresh
    assert "i1: vllm:prompt_tokens_total" in caught.info.error
    assert "i0: " not in caught.info.error
    assert caught.requests == []


def test_without_ray_nothing_of_ray_is_imported():
    script = (
        "import sys, kvtax_fleet.experiment.executors; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)


def test_an_open_loop_keeps_the_traces_arrivals_and_the_cap(tmp_path):
    """Ten sessions arrive over minutes, here within a second, and two may be served."""
    text = smoke_of(arms=1).replace("concurrency = [2]", "concurrency = [1]")
    text = f"open_loop = true\ntime_scale = 100000\n{text}"
    run(written(tmp_path, text), tmp_path / "run")
    (replayed,) = read_run(tmp_path / "run")
    assert replayed.info.status == "ok", replayed.info.error
    assert replayed.info.open_loop
    header = (replayed.folder / "replay.jsonl").read_text().splitlines()[0]
    options = json.loads(header)["options"]
    assert options["max_inflight_sessions"] == 2
    assert not options["closed_loop"]
    assert len({each.arrival_s for each in replayed.requests}) > 1
    assert replayed.end.held_sessions > 0
    assert "waited for a slot" in (tmp_path / "run" / "report.md").read_text()
