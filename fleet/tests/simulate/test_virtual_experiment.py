# SPDX-License-Identifier: Apache-2.0
"""An experiment in virtual time: the files of one in real time, and the same bytes."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from fleet.tests.simulate.two_arms import run, two_arms
from kvtax.cli import Exit

from kvtax_fleet.analyze.arm_runs import ArmRun, read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "two_arms.toml"
    path.write_text(two_arms([2], repeats=2))
    return path


@pytest.fixture(scope="module")
def folder(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first") / "run"
    done = run(config, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[ArmRun]:
    return read_run(folder)


def test_every_request_ends_well_and_was_decided_once(runs: list[ArmRun]) -> None:
    assert len(runs) == 4
    for arm_run in runs:
        assert arm_run.info.status == "ok"
        assert arm_run.info.virtual
        assert arm_run.info.freshness.fresh
        assert len(arm_run.requests) == arm_run.info.trace.requests
        assert {request.status for request in arm_run.requests} == {"ok"}
        ids = {request.id for request in arm_run.requests}
        assert {end.id for end in arm_run.decision_ends} == ids
        assert {decision.id for decision in arm_run.decisions} == ids


def test_moments_are_in_their_order_and_nobody_is_late(runs: list[ArmRun]) -> None:
    for arm_run in runs:
        for request in arm_run.requests:
            assert request.sent_ns == request.intended_ns
            assert request.sent_ns < request.first_token_ns <= request.end_ns


def test_a_repeat_brings_the_sessions_in_another_order(runs: list[ArmRun]) -> None:
    def begun(repeat: int) -> list[str]:
        (only,) = (
            run
            for run in runs
            if run.info.repeat == repeat and run.info.policy == "linear"
        )
        firsts = [request for request in only.requests if request.turn == 0]
        firsts.sort(key=lambda request: request.intended_ns)
        return [request.session for request in firsts]

    assert begun(0) != begun(1)
    assert sorted(begun(0)) == sorted(begun(1))


def test_the_same_experiment_gives_the_same_bytes_and_runs_may_use_all_cores(
    config: Path, folder: Path, tmp_path: Path
) -> None:
    again = tmp_path / "run"
    last_cores: dict[int, set[int]] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            last_cores.update(simulating_on_cores(again))

    watching = threading.Thread(target=watch)
    watching.start()
    done = run(config, again)
    ended.set()
    watching.join()
    assert done.returncode == 0, done.stderr
    # Processes that simulate: one with vLLM, and its forks.
    assert len(last_cores) > 1
    assert all(cores == os.sched_getaffinity(0) for cores in last_cores.values())
    files = sorted(
        path.relative_to(folder)
        for kind in ("*.json", "*.jsonl", "*.gz", "*.prom", "*.md")
        for path in folder.rglob(kind)
    )
    assert len(files) > 4 * 5
    differ = [
        str(name)
        for name in files
        if (folder / name).read_bytes() != (again / name).read_bytes()
    ]
    assert differ == []


def simulating_on_cores(files_below: Path) -> dict[int, set[int]]:
    by_arm = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = os.fsdecode((folder / "cmdline").read_bytes())
            if "kvtax_fleet.simulate" in command and str(files_below) in command:
                by_arm[int(folder.name)] = os.sched_getaffinity(int(folder.name))
        except OSError:
            continue
    return by_arm


def test_resuming_makes_only_what_is_missing(
    config: Path, folder: Path, tmp_path: Path
) -> None:
    kept, lost = "linear@2/r0/arm.json", "round_robin@2/r1"
    before = (folder / kept).stat().st_mtime_ns
    (folder / lost / "arm.json").rename(tmp_path / "arm.json")
    assert run(config, folder, "--resume").returncode == 0
    assert (folder / kept).stat().st_mtime_ns == before
    made = (folder / lost / "arm.json").read_bytes()
    assert made == (tmp_path / "arm.json").read_bytes()


def test_answers_of_one_token_end_with_a_report(tmp_path: Path) -> None:
    """Prefill alone: no answer has a time per further token."""
    config, out = tmp_path / "one_token.toml", tmp_path / "out"
    text = two_arms([2], repeats=2)
    config.write_text(text.replace("max_output_tokens = 40", "max_output_tokens = 1"))
    done = run(config, out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT" in (out / "report.md").read_text()
    assert (out / "analysis.json").exists()


def test_a_run_that_can_write_nothing_ends_the_command(tmp_path: Path) -> None:
    config, out = tmp_path / "two_arms.toml", tmp_path / "out"
    config.write_text(two_arms([1], repeats=1))
    out.mkdir()
    (out / "linear@1").write_text("in the way")
    done = run(config, out)
    assert done.returncode == Exit.BAD_INPUT
    assert "kvtax: " in done.stderr and "linear@1" in done.stderr


class AnyCell(msgspec.Struct):
    note: str


def leave_a_segment(cell: AnyCell, cores: set[int]) -> None:
    segment = Path("/dev/shm", f"__KMP_REGISTERED_LIB_{os.getpid()}_test")
    segment.touch()
    Path(cell.note).write_text(str(segment))


def test_what_openmp_leaves_in_memory_goes_with_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_vllm = ("endpoints", "transfers", "virtual_engine", "virtual_instance")
    for name in (*of_vllm, "run_cells"):
        monkeypatch.setitem(sys.modules, f"kvtax_fleet.simulate.{name}", MagicMock())
    del sys.modules["kvtax_fleet.simulate.run_cells"]
    run_cells = importlib.import_module("kvtax_fleet.simulate.run_cells")
    monkeypatch.setattr(run_cells, "Cell", AnyCell)
    monkeypatch.setattr(run_cells, "_import_all", lambda cell: None)
    monkeypatch.setattr(run_cells, "_run_or_fail", leave_a_segment)
    cell, note = tmp_path / "cell", tmp_path / "note"
    cell.write_bytes(msgspec.json.encode(AnyCell(str(note))))
    monkeypatch.setattr("sys.argv", ["run_cells", "1", str(cell)])
    run_cells.main()
    assert not Path(note.read_text()).exists()


MOVES = """
summary = "KV moves between two instances, in virtual time"
profile = "h20-30b-a3b"
instances = 2
concurrency = [2]
repeats = 1
baseline = "mooncake"

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
sessions = 8
max_turns = 3
max_output_tokens = 40
max_think_s = 0

[arms.mooncake]
policy = "elastic"
parameters = { warm_tokens = 1000, heavy_tokens = 4000 }
connector = "mooncake_both_fixed"

[arms.nixl]
policy = "elastic"
parameters = { warm_tokens = 1000, heavy_tokens = 4000 }
connector = "nixl_both"
"""


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ArmRun]:
    folder = tmp_path_factory.mktemp("moves")
    (folder / "moves.toml").write_text(MOVES)
    done = run(folder / "moves.toml", folder / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        arm_run.info.arm.partition("@")[0]: arm_run
        for arm_run in read_run(folder / "run")
    }


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
def test_heavy_prompts_are_prefilled_elsewhere_and_their_kv_arrives(
    moved: dict[str, ArmRun], connector: str
) -> None:
    arm_run = moved[connector]
    assert {request.status for request in arm_run.requests} == {"ok"}
    offloads = [end.offload for end in arm_run.decision_ends if end.offload is not None]
    assert offloads
    assert {offload.failure for offload in offloads} == {None}
    for offload in offloads:
        assert offload.begun_ns <= offload.decode_asked_ns < offload.ended_ns
        # Over NIXL, D is asked when P has answered.
        if connector == "nixl":
            assert offload.decode_asked_ns >= offload.prefilled_ns
