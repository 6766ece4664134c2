# SPDX-License-Identifier: Apache-2.0
"""One process with both versions of what a fix changes, timed in turn.

Run by costs.growth with a private tree first on PYTHONPATH.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np

from costs.growth.connectors import SUBJECTS, Subject
from costs.growth.pools import PoolBench, time_first_chunk
from costs.growth.scheduler import BLOCK_SIZE, LoneScheduler
from costs.growth.twin import TimedTwin
from costs.growth.variants import before_and_after
from lab.serving.engine_process import serve

WARM_UP_STEPS = 20


class Bench:
    """Both versions of one connector, for schedulers of any size."""

    def __init__(self, model: Path, subject: Subject) -> None:
        self._model, self._subject = model, subject
        self._modules = before_and_after(subject.module)
        for module in self._modules:
            subject.prepare(module)

    def scheduler(self, running: int, context_tokens: int, steps: int) -> LoneScheduler:
        length = context_tokens + steps + BLOCK_SIZE
        return LoneScheduler(
            self._model,
            self._subject.idle,
            lambda *configs: TimedTwin(
                *(self._subject.make(module, *configs) for module in self._modules)
            ),
            self._subject.worker(),
            num_blocks=(running + 1) * (length // BLOCK_SIZE + 2),
            max_model_len=length,
            max_requests=running,
            max_batched_tokens=running * length,
        )


def time_decode(bench: Bench, running: int, context_tokens: int, steps: int):
    """us of `build_connector_meta` before and after the fix: (2, steps).

    Both versions get what the scheduler gives in the same decode-only step, while
    `running` requests of `context_tokens` run and nothing is to be loaded.
    """
    lone = bench.scheduler(running, context_tokens, WARM_UP_STEPS + steps)
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


def main() -> None:
    model, fix, block_tokens, socket = sys.argv[1:]
    if fix in SUBJECTS:
        serve(Bench(Path(model), SUBJECTS[fix]), socket, time_decode)
    else:
        serve(PoolBench(int(block_tokens)), socket, time_first_chunk)


if __name__ == "__main__":
    main()
