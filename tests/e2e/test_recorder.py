# SPDX-License-Identifier: Apache-2.0
"""kvtax-probe as a plugin of untouched servers: each engine and each life is whole."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtax.engine.server import Server
from kvtax.look.discover import discover
from kvtax.look.instances import read_instance
from kvtax.proc.supervise import signal_all
from kvtax.records.requests import read_engine_requests
from kvtax.records.steps import lives
from tests.e2e.doors import await_written, complete, through, unrecorded
from tests.harness.tiny.checkpoint import write_checkpoint
from tests.releases import under_test

pytestmark = pytest.mark.e2e

REQUESTS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", seed=1)


@contextmanager
def serving(
    folder: Path, checkpoint: Path, *arguments: str, **settings: int
) -> Iterator[Server]:
    """An untouched vLLM with the plugin, which records to folder/records."""
    server = unrecorded(folder, checkpoint, under_test(), **settings).told(*arguments)
    with Server(through("plugin", server, folder, under_test())) as started:
        started.wait_ready()
        yield started


def complete_all(server: Server) -> None:
    """Send REQUESTS requests at once."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(complete, [server.url] * REQUESTS, range(REQUESTS)))


def check_lives(records: Path, count: int, ranks: int) -> int:
    """Each life has its engine's steps and its workers'; requests of all lives."""
    found, warnings = discover(records)
    assert warnings == []
    assert len(found) == len(lives(records)) == count
    requests = 0
    for each in found:
        instance = read_instance(each)
        assert not [w for w in instance.warnings if w.kind != "few_steps"]
        steps = instance.steps
        assert steps["worker.get_finished_us"].is_not_null().all()
        assert (steps["model_us"] > 0).all()
        life = each.path.parent
        assert len(list(life.glob("worker_step.r*.jsonl"))) == ranks
        ended = read_engine_requests(life / "engine_request.jsonl").records
        # A step that brings a prompt's tokens brings the first of the answer.
        decoded = sum(one.output_tokens - 1 for one in ended)
        assert steps["decode_tokens"].sum() == decoded
        requests += len(ended)
    return requests


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.long)])
def test_data_parallel_engines_and_a_restart_are_whole(checkpoint, tmp_path, starts):
    for start in range(1, starts + 1):
        with serving(tmp_path, checkpoint, data_parallel=2) as server:
            complete_all(server)
        requests = check_lives(tmp_path / "records", 2 * start, ranks=1)
        assert requests == start * REQUESTS
    found, _ = discover(tmp_path / "records")
    assert sorted(one.header.dp_rank for one in found) == sorted([0, 1] * starts)
    assert len({one.engine for one in found}) == 2


@pytest.mark.long
def test_a_killed_server_that_starts_again_with_more_workers_has_two_lives(
    checkpoint, tmp_path
):
    with serving(tmp_path, checkpoint) as server:
        complete_all(server)
        await_written(tmp_path / "records", REQUESTS)
        signal_all(server.supervised.pids(), signal.SIGKILL)
    with serving(tmp_path, checkpoint, "--tensor-parallel-size", "2") as server:
        complete_all(server)
    found, warnings = discover(tmp_path / "records")
    assert warnings == []
    for each, ranks in zip(found, (1, 2), strict=True):
        assert len(list(each.path.parent.glob("worker_step.r*.jsonl"))) == ranks
        instance = read_instance(each)
        assert not [w for w in instance.warnings if w.kind != "few_steps"]
        # A killed worker has not written its last step.
        assert instance.steps["worker.get_finished_us"][:-1].is_not_null().all()
        assert instance.requests.height == REQUESTS


@pytest.mark.long
@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_every_worker_of_a_parallel_engine_is_recorded(checkpoint, tmp_path, way):
    parallel = (f"--{way}-parallel-size", "2")
    with serving(tmp_path, checkpoint, *parallel) as server:
        complete_all(server)
    assert check_lives(tmp_path / "records", 1, ranks=2) == REQUESTS
