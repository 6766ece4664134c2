# SPDX-License-Identifier: Apache-2.0
"""A real engine and a virtual one, given the same requests round by round."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from kvtax_fleet.experiment.virtual import EVENTS
from kvtax_fleet.launch.instance_settings import Transfer
from kvtax_fleet.records.host_times import StepTime, StepTimes
from kvtax_fleet.simulate.cost import StepCost
from kvtax_fleet.simulate.virtual_engine import Moves, VirtualEngine
from kvtax_fleet.simulate.virtual_loop import VirtualLoop

from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine
from kvtax.engine.null_model import Forward

MAX_MODEL_LEN = 8_192
FORWARD_NS = 5_000_000
# 10 us per block, and 5 us on the way.
LINK = Transfer(kv_bytes_per_token=1, gbit_s=16 * 8 / 1e4, latency_us=5)
BLOCK_NS, LATENCY_NS = 10_000, 5_000
# vLLM looks at a request that waits for KV once in a millisecond.
LOOK_NS = 1_000_000
STEM_TOKENS = 1_600
MOONCAKE = {
    "kv_connector": "MooncakeConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}


def cost(**scheduler_us: float) -> StepCost:
    """Every forward takes FORWARD_NS, and the scheduler what is said."""
    host = StepTimes(scheduler=StepTime(**scheduler_us))
    return StepCost(Forward(forward_us=FORWARD_NS / 1e3), host)


def virtual_engine(
    model: Path,
    num_blocks: int,
    overlapping: bool,
    moves: Moves | None = None,
    max_requests: int = 64,
    events: bool = False,
    connector: dict[str, Any] = MOONCAKE,
    **scheduler_us: float,
) -> VirtualEngine:
    """One with `moves` has the connector."""
    arguments = {
        "--model": model,
        "--load-format": "dummy",
        "--block-size": BLOCK_SIZE,
        "--num-gpu-blocks-override": num_blocks,
        "--max-model-len": min(MAX_MODEL_LEN, (num_blocks - 1) * BLOCK_SIZE),
        "--max-num-batched-tokens": 8_192,
        "--max-num-seqs": max_requests,
    }
    argv = [str(part) for pair in arguments.items() for part in pair]
    argv += ["--skip-tokenizer-init", "--enforce-eager"]
    if moves is not None:
        argv += ["--kv-transfer-config", json.dumps(connector)]
    if events:
        argv += EVENTS
    return VirtualEngine(argv, cost(**scheduler_us), overlapping, moves)


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """What comes of the work, on a simulated clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Round:
    """What reaches an engine between two steps."""

    def __init__(self, asked: list[tuple[list[int], int]], aborted: list[str]) -> None:
        self.asked = asked
        self.aborted = aborted


def rounds(seed: int, count: int) -> Iterator[Round]:
    """Prompts that share long beginnings, with answers of up to 80 tokens."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, 1000) for _ in range(STEM_TOKENS)] for _ in range(4)]
    sent = 0
    for number in range(count):
        asked, aborted = [], []
        for _ in range(rng.choice([0, 0, 0, 0, 1, 1, 3]) if number < count // 2 else 0):
            stem = rng.choice(stems)[: rng.randrange(STEM_TOKENS)]
            tail = [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 1_500))]
            asked.append((stem + tail, rng.randrange(1, 80)))
        if sent and rng.random() < 0.05:
            aborted.append(str(rng.randrange(sent)))
        sent += len(asked)
        yield Round(asked, aborted)


class Witness:
    """Notes all that each schedule() of an engine core decided."""

    def __init__(self, core: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self.preemptions = 0
        self._core = core
        self._schedule = core.scheduler.schedule
        core.scheduler.schedule = self._witnessed

    def _witnessed(self) -> Any:
        output = self._schedule()
        pool = self._core.scheduler.kv_cache_manager.block_pool
        self.preemptions += len(output.preempted_req_ids)
        self.seen.append(
            {
                "scheduled": dict(output.num_scheduled_tokens),
                "new": [
                    # A worker in the same process adds to the very list.
                    (
                        request.req_id,
                        request.num_computed_tokens,
                        str(request.block_ids),
                    )
                    for request in output.scheduled_new_reqs
                ],
                "blocks": str(output.scheduled_cached_reqs.new_block_ids),
                "preempted": set(output.preempted_req_ids),
                "finished": set(output.finished_req_ids),
                "cached": len(pool.cached_block_hash_to_block),
                "free": pool.get_num_free_blocks(),
            }
        )
        return output


def answers_of(outputs: Any) -> list[tuple]:
    """What the engine answers at the end of a round."""
    return [
        (
            output.request_id,
            output.new_token_ids,
            output.finish_reason,
            output.num_cached_tokens,
        )
        for output in (outputs.outputs if outputs else [])
    ]


def drive_real(engine: NullEngine, script: list[Round]) -> list[list[tuple]]:
    core, answers = engine.core, []
    for turn in script:
        for prompt, output_tokens in turn.asked:
            engine.add(prompt, output_tokens)
        core.abort_requests(turn.aborted)
        outputs, executed = core.step_fn()
        core.post_step(executed)
        answers.append(answers_of(outputs.get(0) if outputs else None))
    return answers


def drive_virtual(engine: VirtualEngine, script: list[Round]) -> list[list[tuple]]:
    sent, answers = 0, []
    for turn in script:
        for prompt, output_tokens in turn.asked:
            engine.add(str(sent), prompt, output_tokens, None)
            sent += 1
        for request_id in turn.aborted:
            engine.abort(request_id)
        answers.append(answers_of(engine.step()))
    return answers
