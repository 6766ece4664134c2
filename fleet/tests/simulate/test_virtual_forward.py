# SPDX-License-Identifier: Apache-2.0
"""Inputs of virtual time: a forward from records, a host from measured cells."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from kvtax.engine.null_model import Forward
from kvtax.engine.vllm_plugin.kvtax_null_model.forward import SimulatedForward
from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord, keep_cell
from kvtax.records.requests import EngineRequest, EngineRequestHeader
from kvtax.records.steps import EngineHeader, EngineStep
from studies.host_table.host import step_times, write_host_times

from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.host_times import HostTimes, StepTime, StepTimes
from kvtax_fleet.simulate.fit_forward import fitted_table

FORWARD = Forward(6600, us_per_token=74, us_per_context_token=0.0088)
BUDGET_TOKENS = 2048
RUNNING = 8
SCHEDULE_US, UPDATE_US = 300.0, 150.0


@dataclass
class Server:
    """Schedules as vLLM does: decodes first, then prompts in the order they came.

    With `overlapping`, a step is scheduled when the one before was.
    """

    overlapping: bool = False
    held_up: float = 0
    every: int = 1
    ids: str = "hashed"
    steps: list[EngineStep] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)

    def serve(self, folder: Path, requests: int = 60) -> Path:
        draw = random.Random(1)
        forward = SimulatedForward(**msgspec.structs.asdict(FORWARD))
        waiting = [self._request(draw, number) for number in range(requests)]
        running: list[tuple[EngineRequest, list[int]]] = []
        step, launch_us, done_us = 0, 0.0, 0.0
        while waiting or running:
            while waiting and len(running) < RUNNING:
                request = waiting.pop(0)
                running.append(
                    (request, [request.cached_tokens or 0, draw.randrange(2, 60)])
                )
            began_us = launch_us if self.overlapping else done_us
            launch_us = began_us + SCHEDULE_US
            prefill, decodes, attended = self._schedule(step, running)
            took_us = forward.duration_us(prefill + decodes, attended)
            if draw.random() < self.held_up:
                took_us *= 4
            done_us = max(done_us, launch_us) + took_us
            self.steps.append(
                EngineStep(
                    step,
                    round(1e3 * began_us),
                    schedule_us=SCHEDULE_US,
                    step_us=done_us + UPDATE_US - began_us,
                    update_us=UPDATE_US,
                    prefill_tokens=prefill,
                    decode_tokens=decodes,
                )
            )
            # The engine's thread goes on when outputs are there and taken in.
            done_us += 0 if self.overlapping else UPDATE_US
            running = [pair for pair in running if pair[0].last_step is None]
            step += 1
        self._write(folder)
        return folder

    def _request(self, draw: random.Random, number: int) -> EngineRequest:
        cached = draw.choice((0, 4_000, 20_000))
        prompt = cached + draw.randrange(1, 9_000)
        return EngineRequest(str(number), number, prompt, cached_tokens=cached)

    def _schedule(
        self, step: int, running: list[tuple[EngineRequest, list[int]]]
    ) -> tuple[int, int, int]:
        prefill = decodes = attended = 0
        for request, state in running:
            if request.first_token_step is None:
                continue
            attended += request.prompt_tokens + request.output_tokens - 1
            decodes += 1
            request.output_tokens += 1
            if request.output_tokens == state[1]:
                request.last_step = step
        for request, state in running:
            count = min(
                request.prompt_tokens - state[0], BUDGET_TOKENS - prefill - decodes
            )
            if request.first_token_step is not None or not count:
                continue
            request.first_step = (
                step if request.first_step is None else request.first_step
            )
            attended += count * state[0] + count * (count - 1) // 2
            state[0] += count
            prefill += count
            if state[0] == request.prompt_tokens:
                request.first_token_step, request.output_tokens = step, 1
                self.requests.append(request)
        return prefill, decodes, attended

    def _write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        header = EngineHeader(every=self.every)
        write(folder / "engine_step.jsonl", [header, *self.steps])
        write(folder / "engine_request.jsonl", [EngineRequestHeader(), *self.requests])


def write(path: Path, lines: list[msgspec.Struct]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("held_up", [0, 0.05])
def test_a_servers_forward_is_found_again(
    overlapping: bool,
    held_up: float,
    tmp_path: Path,
) -> None:
    """With a twentieth of the steps held up by the host fourfold, too."""
    table = fitted_table(Server(overlapping, held_up).serve(tmp_path))
    fitted = tomllib.loads(table)["forward"]
    assert msgspec.convert(fitted, Forward).forward_us == pytest.approx(6600, rel=0.02)
    assert fitted["us_per_token"] == pytest.approx(74, rel=0.02)
    assert fitted["us_per_context_token"] == pytest.approx(0.0088, rel=0.02)


def test_steps_of_unknown_tokens_do_not_count(tmp_path: Path) -> None:
    """A request that its client gave up, one preempted, one never told of."""
    server = Server()
    server.serve(tmp_path, requests=100)
    given_up = server.requests[20]
    given_up.finished_ns = server.steps[given_up.last_step].t_ns + 1
    given_up.last_step = None
    server.requests[30].preemptions = 1
    del server.requests[40]
    server._write(tmp_path)
    table = fitted_table(tmp_path)
    assert " 100.0% of all" not in table
    assert tomllib.loads(table)["forward"]["us_per_token"] == pytest.approx(
        74, rel=0.01
    )


def test_records_that_do_not_suffice_are_refused(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(RecordsError) as refusal:
            fitted_table(folder)
        return str(refusal.value)

    assert "missing" in refused(tmp_path / "nothing")
    assert "200 are needed" in refused(Server().serve(tmp_path / "few", requests=3))
    sampled = Server(every=10).serve(tmp_path / "sampled")
    assert "unset KVTAX_STEP_RECORDS_EVERY" in refused(sampled)
    untold = Server().serve(tmp_path / "untold")
    (untold / "engine_request.jsonl").unlink()
    assert "engine_request.jsonl: missing" in refused(untold)
    untimed = Server()
    untimed.serve(tmp_path / "untimed")
    for step in untimed.steps:
        step.step_us = None
    untimed._write(tmp_path / "untimed")
    assert "steps without step_us" in refused(tmp_path / "untimed")


LEVELS = {
    "running": [1, 64, 128],
    "arrivals": [0, 8, 16],
    "context": [1_024, 32_768, 65_536],
    "cache": [256, 8_192, 16_384],
}
WALK_US = 0.0856
# A request of 64 tokens has 4 cached blocks, and of 4 requests a token each has 1/4.
PER_UNIT_US = {
    "running": 3.0 + 4 * WALK_US,
    "arrivals": 50.0,
    "context": 0.004 + WALK_US / 4,
    "cache": WALK_US,
}
COMMITTED = sorted((CONFIGS / "hosts").glob("*.json"))


def cell(folder: Path, scheduler_base_us: float, worker_us: float) -> None:
    """A cell of an engine whose scheduler grows along every axis, its worker not."""
    means_us = {}
    for axis, levels in LEVELS.items():
        us = [scheduler_base_us + PER_UNIT_US[axis] * level for level in levels]
        passes = {"scheduler_us": us, "step_us": [value + worker_us for value in us]}
        means_us[axis] = {name: [values] * 3 for name, values in passes.items()}
    record = CellRecord(
        release="0.18.1",
        connector="made_up",
        provenance={},
        wall_s=1,
        levels=LEVELS,
        means_us=means_us,
    )
    keep_cell(record, folder)


def test_slopes_of_a_cell_are_slopes_of_the_hosts_times(tmp_path: Path) -> None:
    cell(tmp_path, 60, 900)
    times = step_times(tmp_path / "0.18.1.jsonl.xz")["made_up"]
    assert times.worker == StepTime(base_us=900)
    assert msgspec.structs.asdict(times.scheduler) == pytest.approx(
        {
            "base_us": 60,
            "us_per_request": 3,
            "us_per_new_request": 50,
            "us_per_1k_context_tokens": 1,
            "us_per_1k_cached_blocks": 85.6,
        }
    )


def test_a_missing_file_of_cells_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=str(tmp_path)):
        write_host_times(tmp_path / "out.json", "-", tmp_path / "none", None)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_host_s_steps_are_those_of_the_committed_cells(path: Path) -> None:
    """Or nothing, where a profile's forward is of whole steps."""
    cells = REPOSITORY / "studies" / "observatory" / "0.18.1.jsonl.xz"
    steps = read_document(path, HostTimes).steps
    if set(steps.values()) != {StepTimes()}:
        assert steps == step_times(cells)
