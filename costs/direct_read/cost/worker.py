# SPDX-License-Identifier: Apache-2.0
"""One process with an engine core whose prefix cache is full, stepped on demand.

Run by costs.direct_read.cost with a private tree first on PYTHONPATH.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from connectors.direct_read.server import THREAD_NAME
from costs.direct_read.cost.rows import Chunk
from lab.serving.connector import load_connector
from lab.serving.engine_process import serve, thread_cpu_s, thread_ids
from lab.serving.null_engine import BLOCK_SIZE, MAX_MODEL_LEN, NullEngine

WARM_UP_STEPS = 50
# For the batch that decodes, and for what a use of the prompts leaves behind: one block
# per prompt that is not full, so not cached, and is reused last.
SPARE_BLOCKS = 16_384
# What peers read: this many prompts of this many blocks. They are used before each
# round, so the batch evicts other blocks.
PROMPTS, PROMPT_BLOCKS = 64, 64
VOCABULARY = 1_000
CALLS = 20_000


class CachingEngine(NullEngine):
    """An engine with room for `blocks` cached blocks, its side channel at `port`."""

    def __init__(self, model: Path, connector: str, blocks: int, port: int) -> None:
        transfer = dict(load_connector(connector).kv_transfer_config or {})
        if "kv_connector_extra_config" in transfer:
            transfer["kv_connector_extra_config"] |= {"port": port}
        super().__init__(model, transfer, blocks + SPARE_BLOCKS)
        self.blocks = blocks
        rng = np.random.default_rng(0)
        self._fillers = [
            rng.integers(1, VOCABULARY, MAX_MODEL_LEN - 2).tolist()
            for _ in range(-(-blocks // (MAX_MODEL_LEN // BLOCK_SIZE - 1)))
        ]
        self._prompts = [
            rng.integers(1, VOCABULARY, PROMPT_BLOCKS * BLOCK_SIZE + 1).tolist()
            for _ in range(PROMPTS)
        ]

    def num_cached(self) -> int:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return len(pool.cached_block_hash_to_block)

    def fill(self) -> None:
        for prompt in self._fillers:
            self.add(prompt, 1)
        self.run_to_end()

    def use_prompts(self) -> list[list[bytes]]:
        """Cache the prompts, so that they are evicted last; their block hashes."""
        ids = [self.add(prompt, 1) for prompt in self._prompts]
        requests = self.core.scheduler.requests
        hashes = [list(requests[request_id].block_hashes) for request_id in ids]
        self.run_to_end()
        return hashes


def fill(engine: CachingEngine) -> list[list[bytes]]:
    """Fill the cache; the block hashes of the prompts that can be read."""
    engine.fill()
    return engine.use_prompts()


def use_prompts(engine: CachingEngine) -> None:
    engine.use_prompts()


def time_chunk(engine: CachingEngine, batch: int, steps: int) -> Chunk:
    """Decode-only steps of one batch."""
    engine.use_prompts()
    ids = engine.decode_batch(batch, WARM_UP_STEPS + steps)
    engine.time(WARM_UP_STEPS)
    before, began_s = cpu_s(), time.perf_counter()
    step_us = engine.time(steps)
    seconds = time.perf_counter() - began_s
    spent = {name: spent_s - before[name] for name, spent_s in cpu_s().items()}
    cached = engine.num_cached()
    engine.core.abort_requests(ids)
    engine.run_to_end()
    return Chunk(np.array(step_us), seconds, spent, cached)


def cpu_s() -> dict[str, float]:
    """CPU seconds by kind: the engine's thread, the side channel's, the transport's.

    Threads that Python does not know are Mooncake's: the transport's.
    """
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent = {"engine": 0.0, "side channel": 0.0, "transport": 0.0}
    for native_id in thread_ids():
        name = python.get(native_id)
        if native_id == threading.main_thread().native_id:
            kind = "engine"
        elif name == THREAD_NAME:
            kind = "side channel"
        elif name is None:
            kind = "transport"
        else:
            continue
        spent[kind] += thread_cpu_s(native_id)
    return spent


def time_calls(engine: CachingEngine, batch: int) -> float:
    """us per decode-only step of the connector's calls, in a tight loop."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    ids = engine.decode_batch(batch, WARM_UP_STEPS)
    scheduler: Any = engine.core.scheduler
    output = scheduler.schedule()
    connector, worker = scheduler.connector, get_kv_transfer_group()
    metadata = connector.build_connector_meta(output)
    worker.bind_connector_metadata(metadata)
    connector.take_events()
    began_ns = time.perf_counter_ns()
    for _ in range(CALLS):
        connector.build_connector_meta(output)
        worker.start_load_kv(None)
        worker.get_finished(set())
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        connector.take_events()
    spent_us = (time.perf_counter_ns() - began_ns) / 1e3 / CALLS
    worker.clear_connector_metadata()
    engine.core.abort_requests(ids)
    engine.run_to_end()
    return spent_us


def main() -> None:
    model, connector, blocks, port, socket = sys.argv[1:]
    engine = CachingEngine(Path(model), connector, int(blocks), int(port))
    serve(engine, socket, fill, use_prompts, time_chunk, time_calls)


if __name__ == "__main__":
    main()
