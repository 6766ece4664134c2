# SPDX-License-Identifier: Apache-2.0
"""What a real server was asked, a virtual engine schedules as it did: to the token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kvtax.engine.connector import load_connector
from kvtax.engine.environment import record_steps
from kvtax.engine.null_model import Forward
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import FIRST, staggered
from kvtax.records.files import read_lines
from kvtax.records.requests import read_engine_requests
from kvtax.records.steps import EngineHeader, EngineStep, only_life

from kvtax_fleet.experiment.config import Workload
from kvtax_fleet.experiment.workload import make_workload
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.launch.launched import Workshop, launched, wait_ready
from kvtax_fleet.launch.spec import FleetSpec, members, server_of
from kvtax_fleet.paths import CONFIGS

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# With 8 sessions of up to 62,000 tokens, blocks are evicted and requests wait for some.
BLOCKS = 10_000
SETTINGS = read_instance_settings(CONFIGS / "profiles" / "h20-30b-a3b.toml")
FORWARD = Forward(
    **{name: us / 10 for name, us in msgspec.structs.asdict(SETTINGS.forward).items()}
)
TRACE = "traces/claude_code_sessions_le62k.jsonl.xz"
WORKLOAD = Workload(
    TRACE, sessions=24, max_turns=5, max_output_tokens=80, max_think_s=0
)
OF_A_STEP = (
    "step_id",
    "running",
    "waiting",
    "scheduled",
    "prefill_tokens",
    "decode_tokens",
    "cache_size",
    "free_blocks",
    "preemptions",
)
OF_A_REQUEST = (
    "prompt_tokens",
    "first_step",
    "first_token_step",
    "last_step",
    "finish_reason",
    "cached_tokens",
    "output_tokens",
    "preemptions",
    "preempted_steps",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The records of a real server, and those of a virtual engine after it."""
    folder = tmp_path_factory.mktemp("lockstep")
    trace, ours = folder / "trace.jsonl.gz", folder / "ours"
    ours.mkdir()
    make_workload(WORKLOAD, trace, closed_loop=True, seed=3)
    spec = FleetSpec(
        msgspec.structs.replace(SETTINGS, num_blocks=BLOCKS, forward=FORWARD),
        "plain",
        msgspec.structs.replace(
            load_connector("plain"),
            patches=["step_timing_v2"],
            env={"KVTAX_REQUEST_IDS": "plain"},
        ),
    )
    with Workshop(folder / "workshop") as workshop:
        vocab_size = workshop.checkpoint(spec.settings).vocab_size
        with launched(spec, workshop, folder / "theirs") as (server,):
            wait_ready([server])
            replay(server.instance.url, trace, vocab_size, folder / "replay.jsonl")
        theirs = server.folder
        (member,) = members(spec, staggered(FIRST, 1), [[]])
        overlay, model = workshop.overlay(spec)[0], workshop.checkpoint(spec.settings)
        served = server_of(spec, member, overlay, model.folder, folder)
        plan = folder / "told.json"
        plan.write_text(
            json.dumps(
                {
                    "arguments": served.arguments,
                    "records": str(theirs),
                    "trace": str(trace),
                    "vocab_size": vocab_size,
                }
            )
        )
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("lockstep.py")), str(plan)],
            env=served.env | record_steps(ours, {}),
            check=True,
            timeout=600,
        )
    return theirs, ours


def replay(url: str, trace: Path, vocab_size: int, out: Path) -> None:
    options = ["--url", url, "--trace", str(trace), "--out", str(out)]
    options += ["--vocab-size", str(vocab_size), "--closed-loop"]
    options += ["--max-inflight-sessions", "8", "--lag-budget-ms", "10000"]
    command = [sys.executable, "-m", "kvtax", "fleet", "replay", *options]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=900)


def steps(folder: Path) -> list[tuple]:
    recorded_steps = read_lines(
        only_life(folder) / "engine_step.jsonl", EngineHeader, EngineStep
    ).records
    return [tuple(getattr(step, name) for name in OF_A_STEP) for step in recorded_steps]


def requests(folder: Path) -> dict[str, tuple]:
    records = read_engine_requests(only_life(folder) / "engine_request.jsonl").records
    return {
        record.id: tuple(getattr(record, name) for name in OF_A_REQUEST)
        for record in records
    }


def test_each_step_schedules_the_same(recorded: tuple[Path, Path]) -> None:
    theirs, ours = map(steps, recorded)
    assert len(theirs) > 1_000
    for real, virtual in zip(theirs, ours, strict=True):
        assert virtual == real


def test_each_request_finds_the_same_tokens_cached(
    recorded: tuple[Path, Path],
) -> None:
    theirs, ours = map(requests, recorded)
    assert len(theirs) > 80
    assert ours == theirs
    cached = OF_A_REQUEST.index("cached_tokens")
    assert sum(request[cached] or 0 for request in ours.values()) > 100_000
