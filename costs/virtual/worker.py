# SPDX-License-Identifier: Apache-2.0
"""One process with vLLM that simulates, each time in a fork, and says what that took.

Run by costs.virtual with a private tree first on PYTHONPATH.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

from fleet.launch.instance_settings import read_instance_settings
from fleet.proxy.settings import Settings, resolved
from fleet.replay.options import Options
from fleet.trace import own
from fleet.trace.request import Request
from fleet.virtual.cell import run_cell
from fleet.virtual.cost import StepCost
from fleet.virtual.engine import VirtualEngine
from fleet.virtual.plan import Cell, Member
from lab.paths import CONFIGS
from lab.records.arm import ArmRecord, PlannedArm, TraceFacts
from lab.records.documents import read_document
from lab.records.host_times import RequestTimes, StepTimes
from lab.records.instances import Instance
from lab.serving.engine_process import serve

PROFILE = read_instance_settings(CONFIGS / "fleet" / "h20-30b-a3b.toml")
PROMPT_TOKENS, OUTPUT_TOKENS = 4_096, 256
# Each slot has so many requests, one after the other.
ROUNDS = 8
VOCABULARY = 1_000


def alone(model: str, running: int) -> dict[str, float]:
    """vLLM's engine core, and nothing else of ours than the executor."""
    return _forked(_alone, model, running)


def fleet(model: str, instances: int, running: int) -> dict[str, float]:
    """A whole run: replayer, proxy, policy `linear`, records."""
    return _forked(_fleet, model, instances, running)


def _forked(simulate: Callable[..., float], *told: object) -> dict[str, float]:
    receiving, sending = Pipe(duplex=False)
    child = get_context("fork").Process(target=_timed, args=(sending, simulate, told))
    child.start()
    # Or a child that fails would leave this process waiting.
    sending.close()
    took = receiving.recv()
    child.join()
    return took


def _timed(parent: Connection, simulate: Callable[..., float], told: tuple) -> None:
    began_s = time.process_time()
    instance_s = simulate(*told)
    core_s = time.process_time() - began_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    parent.send({"instance_s": instance_s, "core_s": core_s, "peak_mib": peak_mib})


def _arguments(model: str) -> list[str]:
    told = {
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
    return [str(part) for pair in told.items() for part in pair] + switches


def _alone(model: str, running: int) -> float:
    cost = StepCost(PROFILE.forward, StepTimes())
    engine = VirtualEngine(_arguments(model), cost, False)
    waiting = iter(range(running * ROUNDS))

    def begin() -> None:
        for number in waiting:
            prompt = [number % VOCABULARY, number // VOCABULARY] * (PROMPT_TOKENS // 2)
            engine.add(str(number), prompt, OUTPUT_TOKENS, None)
            return

    for _ in range(running):
        begin()
    while engine.has_work:
        outputs = engine.step()
        for output in outputs.outputs if outputs else []:
            if output.finish_reason is not None:
                begin()
    return engine.clock.now_ns / 1e9


def _fleet(model: str, instances: int, running: int) -> float:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        requests = _requests(instances * running * ROUNDS)
        own.write(folder / "trace.jsonl", {"requests": len(requests)}, requests)
        members = [
            Member(
                Instance(f"i{n}", f"http://i{n}", block_tokens=PROFILE.block_size),
                _arguments(model),
            )
            for n in range(instances)
        ]
        cell = Cell(
            folder=str(folder / "run"),
            trace=str(folder / "trace.jsonl"),
            planned=PlannedArm(arm="cost", repeat=0, trace=_facts(requests)),
            patches={},
            members=members,
            forward=PROFILE.forward,
            host=StepTimes(),
            requests=RequestTimes(),
            overlapping=False,
            transfer=None,
            event_delay_ns=0,
            vocab_size=VOCABULARY,
            max_model_len=PROFILE.max_model_len,
            proxy=resolved([one.instance for one in members], Settings("linear")),
            replay=Options(
                url="virtual",
                trace="trace.jsonl",
                max_inflight_sessions=instances * running,
                closed_loop=True,
            ),
            seed=0,
        )
        run_cell(cell)
        replay_s = read_document(folder / "run" / "arm.json", ArmRecord).replay_s
        return instances * replay_s


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
    # What making an engine imports, the forks need not.
    VirtualEngine(
        _arguments(sys.argv[1]), StepCost(PROFILE.forward, StepTimes()), False
    )
    serve(sys.argv[1], sys.argv[2], alone, fleet)
