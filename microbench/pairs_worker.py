# SPDX-License-Identifier: Apache-2.0
"""An engine core whose connector is exchanged between steps, for microbench.pairs."""

from __future__ import annotations

import copy
import gc
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine
from kvtax.engine.null_model import CPU_ENGINE

# As in the default sweep: the cache full, five requests of some 4,000 tokens.
NUM_BLOCKS, PROMPT_TOKENS, BATCH = 18_000, 4_096, 5
WARM_UP_STEPS = 50
# Steps in a row with one connector. The first two run with the other's caches.
CHUNK_STEPS, COLD_STEPS = 12, 2


class Mode(NamedTuple):
    """The connectors of both sides, and the block pool's listeners beside them."""

    scheduler_side: Any
    worker_side: Any
    listeners: list[Any]


class SwitchingEngine(NullEngine):
    """Engine with the connector of `config`, or that of `baseline`."""

    def __init__(self, model: Path, config: str, baseline: str) -> None:
        transfer = load_connector(config).kv_transfer_config or {}
        super().__init__(model, CPU_ENGINE.kv_transfer_config | transfer, NUM_BLOCKS)
        scheduler = self.core.scheduler
        other = load_connector(baseline).kv_transfer_config
        sides = [
            _connector(self.core.vllm_config, other, role, scheduler.kv_cache_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        ]
        own = scheduler.connector, kv_transfer_state.get_kv_transfer_group()
        listeners = getattr(self._map(), "listeners", [])
        self.modes = (
            Mode(sides[0], sides[1], []),
            Mode(own[0], own[1], list(listeners)),
        )
        self.schedule_ns: list[int] = []
        scheduler.schedule = self._timed(scheduler.schedule)
        self._fill()

    def _map(self) -> Any:
        return (
            self.core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        )

    def _timed(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        clock, note = time.thread_time_ns, self.schedule_ns.append

        def timed(*arguments: Any) -> Any:
            before = clock()
            result = schedule(*arguments)
            note(clock() - before)
            return result

        return timed

    def switch(self, mode: Mode) -> None:
        """Change the connector, between two steps and while none waits for a transfer.

        Nobody reads what the listeners know, so they may miss some changes.
        """
        self.core.scheduler.connector = mode.scheduler_side
        kv_transfer_state._KV_CONNECTOR_AGENT = mode.worker_side
        if hasattr(self._map(), "listeners"):
            self._map().listeners[:] = mode.listeners

    def start_batch(self, steps: int) -> None:
        """Prefill BATCH requests and leave `steps` decode-only steps."""
        for _ in range(BATCH):
            self.add(self._prompt(), steps + BATCH + 1)
        while any(
            request.num_computed_tokens < PROMPT_TOKENS
            for request in self.core.scheduler.requests.values()
        ):
            self.core.step()

    def time_chunk(self) -> tuple[float, float]:
        """Return medians over steps, us of the thread's CPU: schedule() and all."""
        steps_ns = []
        self.schedule_ns.clear()
        for _ in range(CHUNK_STEPS):
            before = time.thread_time_ns()
            self.core.step()
            steps_ns.append(time.thread_time_ns() - before)
        return (
            float(np.median(self.schedule_ns[COLD_STEPS:])) / 1e3,
            float(np.median(steps_ns[COLD_STEPS:])) / 1e3,
        )

    def _fill(self) -> None:
        for _ in range(NUM_BLOCKS * BLOCK_SIZE // PROMPT_TOKENS + 1):
            self.add(self._prompt(), 1)
        self.run_to_end()

    def _prompt(self) -> list[int]:
        first = next(self._ids)
        return [1 + first % 1_000, 1 + first // 1_000] * (PROMPT_TOKENS // 2)


def _connector(
    vllm_config: Any,
    kv_transfer: dict[str, Any] | None,
    role: KVConnectorRole,
    kv_cache_config: Any,
) -> Any:
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(**(kv_transfer or {}))
    return KVConnectorFactory.create_connector(config, role, kv_cache_config)


def time_quartets(
    engine: SwitchingEngine, quartets: int, seed: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Time chunks in the order A B B A, or B A A B: (quartets, 2) us by part."""
    order = random.Random(seed)
    engine.start_batch(WARM_UP_STEPS + quartets * 4 * CHUNK_STEPS)
    engine.time(WARM_UP_STEPS)
    times_us = np.zeros((2, quartets, 2))
    gc.collect()
    gc.disable()  # so that neither pays for the other's garbage
    for quartet in range(quartets):
        first = order.randrange(2)
        for version in (first, 1 - first, 1 - first, first):
            engine.switch(engine.modes[version])
            times_us[:, quartet, version] += np.array(engine.time_chunk()) / 2
    gc.enable()
    engine.switch(engine.modes[1])
    engine.run_to_end()
    return {"schedule": times_us[0], "step": times_us[1]}


if __name__ == "__main__":
    model, *configs, socket = sys.argv[1:]
    serve(SwitchingEngine(Path(model), *configs), socket, time_quartets)
