# SPDX-License-Identifier: Apache-2.0
"""One instance in virtual time with a host that takes what it is told, in a fork."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.proxy.settings import Settings, resolved
from kvtax_fleet.records.arm import PlannedArm, TraceFacts
from kvtax_fleet.records.host_times import RequestTimes, StepTimes
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.replay.options import Options
from kvtax_fleet.simulate.cells import Cell, Member
from kvtax_fleet.simulate.cost import StepCost
from kvtax_fleet.trace import write_trace
from kvtax_fleet.trace.request import Request

from kvtax.engine.engine_process import serve
from kvtax.records.files import read_lines
from kvtax.records.requests import ReplayedRequest, ReplayEnd, ReplayHeader
from kvtax.stats.quantiles import tpot_of

PROFILE = read_instance_settings(CONFIGS / "profiles" / "h20-30b-a3b.toml")
assert PROFILE.forward is not None
FORWARD = PROFILE.forward
PROMPT_TOKENS, OUTPUT_TOKENS = 4_096, 256
# Each slot has so many requests, one after the other.
ROUNDS = 8
VOCABULARY = 1_000


def latencies(model: str, running: int, host: dict[str, Any]) -> dict[str, float]:
    """Simulate one instance with so many requests under way; return mean times."""
    with get_context("fork").Pool(1) as pool:
        times = msgspec.convert(host, StepTimes)
        return pool.apply(_latencies, (model, running, times))


def _latencies(model: str, running: int, host: StepTimes) -> dict[str, float]:
    with simulated(model, running, host) as folder:
        lines = read_lines(
            folder / "replay.jsonl", ReplayHeader, ReplayedRequest | ReplayEnd
        )
    requests = [
        request for request in lines.records if isinstance(request, ReplayedRequest)
    ]
    ttft_ms, tpot_ms = [], []
    for request in requests:
        if (
            request.sent_ns is None
            or request.first_token_ns is None
            or request.end_ns is None
        ):
            raise RuntimeError(f"{request.id} was not answered: {request.error}")
        ttft_ms.append((request.first_token_ns - request.sent_ns) / 1e6)
        tokens = request.usage_completion_tokens or 0
        tpot_ns = tpot_of(request.first_token_ns, request.end_ns, tokens)
        tpot_ms += [] if tpot_ns is None else [tpot_ns / 1e6]
    return {"ttft_ms": mean(ttft_ms), "tpot_ms": mean(tpot_ms)}


def arguments_of(model: str) -> list[str]:
    """Return the command line of an instance of PROFILE."""
    options = {
        "--model": model,
        "--load-format": "dummy",
        "--block-size": PROFILE.block_size,
        "--num-gpu-blocks-override": PROFILE.num_blocks,
        "--max-model-len": PROFILE.max_model_len,
        "--max-num-batched-tokens": PROFILE.max_num_batched_tokens,
        "--max-num-seqs": PROFILE.max_num_seqs,
        "--stream-interval": 16,
    }
    switches = ["--skip-tokenizer-init", "--enforce-eager"]
    return [str(part) for pair in options.items() for part in pair] + switches


@contextmanager
def simulated(model: str, running: int, host: StepTimes) -> Iterator[Path]:
    """Simulate an instance with so many requests under way; yield the run's folder."""
    from kvtax_fleet.simulate.run_cells import run_cell

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        requests = _requests(running * ROUNDS)
        write_trace(folder / "trace.jsonl", {"requests": len(requests)}, requests)
        instance = Instance("i0", "http://i0", block_tokens=PROFILE.block_size)
        cell = Cell(
            folder=str(folder / "run"),
            trace=str(folder / "trace.jsonl"),
            planned=PlannedArm(arm="cost", repeat=0, trace=_facts(requests)),
            patches={},
            members=[Member(instance, arguments_of(model))],
            forward=FORWARD,
            host=host,
            requests=RequestTimes(),
            overlapping=False,
            transfer=None,
            vocab_size=VOCABULARY,
            max_model_len=PROFILE.max_model_len,
            proxy=resolved([instance], Settings("linear")),
            replay=Options(
                url="virtual",
                trace="trace.jsonl",
                max_inflight_sessions=running,
                closed_loop=True,
            ),
            seed=0,
        )
        run_cell(cell)
        yield folder / "run"


def _requests(count: int) -> list[Request]:
    blocks = PROMPT_TOKENS // 64
    return [
        Request(
            arrival_s=0.0,
            session=str(number),
            turn=0,
            input_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            hashes=list(range(number * blocks, (number + 1) * blocks)),
            block_tokens=64,
        )
        for number in range(count)
    ]


def _facts(requests: list[Request]) -> TraceFacts:
    count = len(requests)
    return TraceFacts(
        "trace.jsonl",
        "",
        "",
        count,
        count,
        count * PROMPT_TOKENS,
        count * OUTPUT_TOKENS,
    )


if __name__ == "__main__":
    from kvtax_fleet.simulate.virtual_engine import VirtualEngine

    model, socket = sys.argv[1:]
    # What making an engine imports, the forks need not.
    VirtualEngine(arguments_of(model), StepCost(FORWARD, StepTimes()), False)
    serve(model, socket, latencies)
