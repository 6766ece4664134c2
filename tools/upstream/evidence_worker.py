# SPDX-License-Identifier: Apache-2.0
"""Both versions of what a patch changes, called in turns: tools.upstream.evidence."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import CPU_ENGINE
from tests.harness.before_after import TimedTwin, before_and_after

Floats = npt.NDArray[np.float64]
MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
MODULES = {
    "block_pool_bounded_hashes": "vllm.v1.core.block_pool",
    "block_pool_delta_listener": "vllm.v1.core.block_pool",
    "mooncake_get_finished_short_circuit": MOONCAKE,
    "mooncake_sorted_block_groups": MOONCAKE,
}
WARM_UP_STEPS, STEPS = 20, 60
HASH_TOKENS = 16
# A chunk of a prompt that is computed in one step.
CHUNK_TOKENS = 2_048
POOL_BLOCKS = 512


class BothVersions:
    """Modules before and after a patch."""

    def __init__(self, model: str, patch: str) -> None:
        self.model, self.order = Path(model), random.Random(0)
        self.subject: Any = None
        if patch not in MODULES:
            from tests.harness.scheduler_alone import SUBJECTS

            self.subject = SUBJECTS[patch]
        self.modules = before_and_after(MODULES.get(patch) or self.subject.module)
        if self.subject:
            for module in self.modules:
                self.subject.prepare(module)
        self.worker: Any = None


def time_metadata(
    versions: BothVersions, _round: int, running: int, context_tokens: int
) -> Floats:
    """Time `build_connector_meta`: (2, steps) us.

    Both get what the scheduler gives in one decode-only step, while `running` requests
    of `context_tokens` run and nothing is to be loaded.
    """
    from tests.harness.scheduler_alone import BLOCK_SIZE, LoneScheduler

    subject = versions.subject
    length = context_tokens + WARM_UP_STEPS + STEPS + BLOCK_SIZE
    lone = LoneScheduler(
        versions.model,
        subject.idle,
        lambda *configs: TimedTwin(
            *(subject.make(module, *configs) for module in versions.modules)
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
        lone.add(prompt, WARM_UP_STEPS + STEPS + 2)
    for _ in range(1 + WARM_UP_STEPS):
        lone.step()
    times_us = lone.core.connector.times_us
    times_us.clear()
    gc.collect()
    gc.disable()  # so that neither version pays for the other's garbage
    for _ in range(STEPS):
        lone.step()
    gc.enable()
    return np.array(times_us).T


def hashes(prompt: int, tokens: int) -> list[bytes]:
    """Make block hashes of a prompt, its own."""
    return [f"{prompt}-{n}".encode().rjust(32) for n in range(tokens // HASH_TOKENS)]


def time_first_chunk(
    versions: BothVersions, number: int, context_tokens: int
) -> Floats:
    """Time `cache_full_blocks` for the first chunk of prompts: (2, steps) us."""
    blocks = CHUNK_TOKENS // HASH_TOKENS
    pools = [
        module.BlockPool(STEPS * blocks + 1, True, HASH_TOKENS)
        for module in versions.modules
    ]
    times_us = np.zeros((2, STEPS))
    for step in range(STEPS):
        prompt = SimpleNamespace(
            block_hashes=hashes(number * STEPS + step, context_tokens)
        )
        for version in versions.order.sample((0, 1), 2):
            chunk = pools[version].get_new_blocks(blocks)
            began_ns = time.perf_counter_ns()
            pools[version].cache_full_blocks(prompt, chunk, 0, blocks, HASH_TOKENS, 0)
            times_us[version, step] = (time.perf_counter_ns() - began_ns) / 1e3
    return times_us


def time_pool(versions: BothVersions, number: int, change: str, who: str) -> Floats:
    """Time a block that is cached, or evicted: (2, 1) ns, the least of ten passes."""
    request = SimpleNamespace(block_hashes=hashes(number, POOL_BLOCKS * HASH_TOKENS))
    times_ns: list[list[float]] = [[], []]
    for _ in range(10):
        for version in versions.order.sample((0, 1), 2):
            pool = versions.modules[version].BlockPool(
                POOL_BLOCKS + 1, True, HASH_TOKENS
            )
            if version and who == "one tracker":
                from vllm.v1.core.block_pool_listener import BlockHashTracker

                BlockHashTracker(pool)
            blocks = pool.get_new_blocks(POOL_BLOCKS)
            took_ns = {}
            began_ns = time.perf_counter_ns()
            pool.cache_full_blocks(request, blocks, 0, POOL_BLOCKS, HASH_TOKENS, 0)
            took_ns["cached"] = time.perf_counter_ns() - began_ns
            pool.free_blocks(blocks)
            began_ns = time.perf_counter_ns()
            pool.get_new_blocks(POOL_BLOCKS)
            took_ns["evicted"] = time.perf_counter_ns() - began_ns
            times_ns[version].append(took_ns[change] / POOL_BLOCKS)
    return np.array([[min(of)] for of in times_ns])


def _mooncake_worker(versions: BothVersions) -> Any:
    """Return the worker of an engine with Mooncake that has nothing to send."""
    if versions.worker is None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        own = load_connector("mooncake_both").kv_transfer_config or {}
        versions.worker = (
            NullEngine(versions.model, CPU_ENGINE.kv_transfer_config | own),
            get_kv_transfer_group(),
        )
    return versions.worker[1].connector_worker


def time_get_finished(
    versions: BothVersions, _round: int, busy_threads: int, quantile: float
) -> Floats:
    """Time `get_finished` of an idle worker: (2, 1) us, a quantile of its calls."""
    worker = _mooncake_worker(versions)
    calls = [module.MooncakeConnectorWorker.get_finished for module in versions.modules]
    stop = threading.Event()
    threads = [
        threading.Thread(target=_compute_until, args=(stop,))
        for _ in range(busy_threads)
    ]
    for thread in threads:
        thread.start()
    times_us: list[list[float]] = [[], []]
    try:
        # Beside a busy thread each wait takes milliseconds.
        for _ in range(40 if busy_threads else 400):
            for version in versions.order.sample((0, 1), 2):
                began_ns = time.perf_counter_ns()
                calls[version](worker)
                times_us[version].append((time.perf_counter_ns() - began_ns) / 1e3)
            time.sleep(0.0005)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return np.array([[np.quantile(of, quantile)] for of in times_us])


def _compute_until(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1_000))


class Side:
    """A block pool of an instance; a request's blocks are cached and then freed."""

    def __init__(self, blocks: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(blocks, True, HASH_TOKENS)
        self._prompts = 0

    def take(self, count: int) -> list[Any] | None:
        """Allocate and cache blocks; None if they do not fit."""
        if self.pool.get_num_free_blocks() < count:
            return None
        blocks: list[Any] = self.pool.get_new_blocks(count)
        self._prompts += 1
        request = SimpleNamespace(
            block_hashes=hashes(self._prompts, count * HASH_TOKENS)
        )
        self.pool.cache_full_blocks(request, blocks, 0, count, HASH_TOKENS, 0)
        return blocks

    def give(self, blocks: list[Any]) -> None:
        """Free a request's blocks, its last one first."""
        self.pool.free_blocks(reversed(blocks))


def count_groups(
    versions: BothVersions, number: int, prefills: int, decodes: int, vary: bool
) -> Floats:
    """Count the groups of transfers between two pools: (2, 2) per 100 blocks.

    A request is held by P while it is prefilled and sent, by D for a random decode.
    The first third of 600 transfers ages the pools. Two seeds a round.
    """
    group = [module.group_concurrent_contiguous for module in versions.modules]
    return np.array(
        [_groups(group, seed, prefills, decodes, vary) for seed in _seeds(number)]
    ).T


def _seeds(number: int) -> tuple[int, int]:
    return 2 * number, 2 * number + 1


def _groups(
    group: list[Callable[..., Any]], seed: int, prefills: int, decodes: int, vary: bool
) -> tuple[float, float]:
    chance = random.Random(seed)
    sender, receiver = Side(12_000), Side(12_000)
    held: list[list[Any]] = []
    decoding: list[list[Any]] = []
    counts, sent_blocks = [0, 0], 0
    for transfer in range(600):
        while len(held) < prefills:
            size = int(min(2_000, max(8, chance.lognormvariate(5, 1)))) if vary else 250
            if (blocks := sender.take(size)) is None:
                break
            held.append(blocks)
        source = held.pop(chance.randrange(len(held)))
        target = None
        while target is None:
            if len(decoding) < decodes:
                target = receiver.take(len(source))
            if target is None:
                receiver.give(decoding.pop(chance.randrange(len(decoding))))
        if transfer >= 200:
            ids = [[block.block_id for block in side] for side in (source, target)]
            sent_blocks += len(source)
            for version in (0, 1):
                counts[version] += len(group[version](*ids)[0])
        decoding.append(target + (receiver.take(chance.randrange(1, 60)) or []))
        sender.give(source)
    return 100 * counts[0] / sent_blocks, 100 * counts[1] / sent_blocks


if __name__ == "__main__":
    model, patch, socket = sys.argv[1:]
    serve(
        BothVersions(model, patch),
        socket,
        time_metadata,
        time_first_chunk,
        time_pool,
        time_get_finished,
        count_groups,
    )
