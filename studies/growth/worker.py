# SPDX-License-Identifier: Apache-2.0
"""Both versions of what a fix changes, timed in turn."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from random import Random

import numpy as np

from kvtax.engine.engine_process import serve
from kvtax.stats.distribution import Floats
from tests.harness.before_after import TimedTwin, before_and_after

WARM_UP_STEPS = 20
# A chunk of a prompt that is computed in one step.
CHUNK_TOKENS = 2_048
HASH_TOKENS = 16


class BothVersions:
    """Modules before and after the fix `patch`, and how the pool's are timed."""

    def __init__(self, model: str, patch: str, block_tokens: str) -> None:
        from tests.harness.scheduler_alone import SUBJECTS

        self.model = Path(model)
        self.block_tokens = int(block_tokens)
        self.order = Random(0)
        self.subject = subject = SUBJECTS.get(patch)
        name = subject.module if subject else "vllm.v1.core.block_pool"
        self.modules = before_and_after(name)
        if subject is not None:
            for module in self.modules:
                subject.prepare(module)


def time_decode(
    fix: BothVersions, running: int, context_tokens: int, steps: int
) -> Floats:
    """Time `build_connector_meta` before and after the fix: (2, steps) us.

    Both versions get what the scheduler gives in the same decode-only step, while
    `running` requests of `context_tokens` run and nothing is to be loaded.
    """
    from tests.harness.scheduler_alone import BLOCK_SIZE, LoneScheduler

    assert fix.subject is not None
    subject = fix.subject
    length = context_tokens + WARM_UP_STEPS + steps + BLOCK_SIZE
    lone = LoneScheduler(
        fix.model,
        subject.idle,
        lambda *configs: TimedTwin(
            *(subject.make(module, *configs) for module in fix.modules)
        ),
        subject.worker(),
        num_blocks=(running + 1) * (length // BLOCK_SIZE + 2),
        max_model_len=length,
        max_requests=running,
        max_batched_tokens=running * length,
    )
    for number in range(running):
        # No two share a block.
        prompt = [number // 900 + 1, number % 900 + 1] * (context_tokens // 2)
        lone.add(prompt, WARM_UP_STEPS + steps + 2)
    for _ in range(1 + WARM_UP_STEPS):
        lone.step()
    times_us = lone.core.connector.times_us
    times_us.clear()
    gc.collect()
    gc.disable()  # so that neither version pays for the other's garbage
    for _ in range(steps):
        output = lone.step()
        assert len(output.scheduled_cached_reqs.req_ids) == running
    gc.enable()
    return np.array(times_us).T


class Prompt:
    """A request as the pool sees it, with random hashes of its own."""

    def __init__(self, number: int, tokens: int) -> None:
        self.block_hashes = [
            f"{number}-{index}".encode().rjust(32)
            for index in range(tokens // HASH_TOKENS)
        ]


def time_first_chunk(
    fix: BothVersions, _running: int, context_tokens: int, steps: int
) -> Floats:
    """Time `cache_full_blocks` for a prompt's first chunk, before and after the fix.

    (2, steps) us: each step is another prompt of `context_tokens`.
    """
    blocks = CHUNK_TOKENS // fix.block_tokens
    times_us = np.zeros((2, steps))
    pools = [
        module.BlockPool(steps * blocks + 1, True, HASH_TOKENS)
        for module in fix.modules
    ]
    for step in range(steps):
        prompt = Prompt(step, context_tokens)
        for version in fix.order.sample((0, 1), 2):
            chunk = pools[version].get_new_blocks(blocks)
            began_ns = time.perf_counter_ns()
            pools[version].cache_full_blocks(
                prompt, chunk, 0, blocks, fix.block_tokens, 0
            )
            times_us[version, step] = (time.perf_counter_ns() - began_ns) / 1e3
    return times_us


if __name__ == "__main__":
    *options, socket = sys.argv[1:]
    serve(BothVersions(*options), socket, time_decode, time_first_chunk)
