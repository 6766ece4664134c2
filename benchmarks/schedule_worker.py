# SPDX-License-Identifier: Apache-2.0
"""One process with an engine core that changes its connector between two steps.

Run by benchmarks.schedule with an overlay first on PYTHONPATH. Scheduler, block
pool and memory are the same whichever connector is in place, so what differs is the
connector's.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from benchmarks.schedule import AGAIN, FLOOR, LISTENED, OWN
from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import BLOCK_SIZE, NOOP, NullEngine
from kvtax.engine.settings import CPU_ENGINE

# As in the default sweep: the cache full, five requests of some 4,000 tokens.
NUM_BLOCKS, PROMPT_TOKENS, BATCH = 18_000, 4_096, 5
WARM_UP_STEPS = 50
# Steps in a row in one mode. The first two run with the other mode's caches.
CHUNK_STEPS, COLD_STEPS = 12, 2


class Mode(NamedTuple):
    """The connectors of both sides, and whether the block pool has listeners."""

    scheduler_side: Any
    worker_side: Any
    listened: bool


class SwitchingEngine(NullEngine):
    """Has the connector of the config `connector`, or another of `modes`."""

    def __init__(self, model: Path, connector: str) -> None:
        transfer = load_connector(connector).kv_transfer_config
        super().__init__(model, CPU_ENGINE.kv_transfer_config | transfer, NUM_BLOCKS)
        scheduler = self.core.scheduler
        noop = [
            _connector(self.core.vllm_config, NOOP, role, scheduler.kv_cache_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        ]
        own = scheduler.connector, kv_transfer_state.get_kv_transfer_group()
        self.modes = {
            FLOOR: Mode(*noop, False),
            AGAIN: Mode(*noop, False),
            LISTENED: Mode(*noop, True),
            OWN: Mode(*own, True),
        }
        self._pool = scheduler.kv_cache_manager.block_pool
        self._listeners = self._pool.cached_block_hash_to_block.listeners
        # Four clock readings a step: schedule() with build_connector_meta() in it.
        self.clock_ns: list[int] = []
        self._note(scheduler, "schedule")
        for side in (noop[0], own[0]):
            self._note(side, "build_connector_meta")
        self._fill()

    def switch(self, mode: str) -> None:
        """Between two steps, while no request waits for a transfer."""
        scheduler_side, worker_side, listened = self.modes[mode]
        self.core.scheduler.connector = scheduler_side
        kv_transfer_state._KV_CONNECTOR_AGENT = worker_side
        # Nobody reads what the listeners know, so they may miss some changes.
        listeners = self._listeners if listened else []
        self._pool.cached_block_hash_to_block.listeners = listeners

    def start_batch(self, steps: int) -> None:
        """Prefill BATCH requests and leave `steps` decode-only steps."""
        for _ in range(BATCH):
            self.add(self._prompt(), steps + BATCH + 1)
        while any(
            request.num_computed_tokens < PROMPT_TOKENS
            for request in self.core.scheduler.requests.values()
        ):
            self.core.step()

    def _fill(self) -> None:
        for _ in range(NUM_BLOCKS * BLOCK_SIZE // PROMPT_TOKENS + 1):
            self.add(self._prompt(), 1)
        self.run_to_end()

    def _prompt(self) -> list[int]:
        first = next(self._ids)
        return [1 + first % 1_000, 1 + first // 1_000] * (PROMPT_TOKENS // 2)

    def _note(self, owner: Any, method: str) -> None:
        call, clock = getattr(owner, method), time.perf_counter_ns
        note = self.clock_ns.append

        def noted(*arguments):
            note(clock())
            result = call(*arguments)
            note(clock())
            return result

        setattr(owner, method, noted)


def _connector(vllm_config, kv_transfer: dict, role: KVConnectorRole, kv_cache_config):
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**kv_transfer)
    return KVConnectorFactory.create_connector(config, role, kv_cache_config)


def time_modes(
    engine: SwitchingEngine, chunks: int, seed: int
) -> dict[str, np.ndarray]:
    """Time schedule() before, in and after build_connector_meta: (3, steps) us by mode.

    Decode-only steps; the modes take turns in chunks, in an order drawn anew.
    """
    order = random.Random(seed)
    engine.start_batch(WARM_UP_STEPS + chunks * CHUNK_STEPS * len(engine.modes))
    engine.time(WARM_UP_STEPS)
    found: dict[str, list[np.ndarray]] = {mode: [] for mode in engine.modes}
    for _ in range(chunks):
        for mode in order.sample(list(engine.modes), len(engine.modes)):
            engine.switch(mode)
            engine.clock_ns.clear()
            engine.time(CHUNK_STEPS)
            clock_us = np.array(engine.clock_ns).reshape(CHUNK_STEPS, 4).T / 1e3
            found[mode].append(np.diff(clock_us, axis=0)[:, COLD_STEPS:])
    engine.switch(OWN)
    engine.run_to_end()
    return {mode: np.concatenate(parts, axis=1) for mode, parts in found.items()}


def main() -> None:
    model, connector, socket = sys.argv[1:]
    serve(SwitchingEngine(Path(model), connector), socket, time_modes)


if __name__ == "__main__":
    main()
