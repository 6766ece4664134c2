# SPDX-License-Identifier: Apache-2.0
"""Cost of listening to vLLM's block pool: ns per block changed, us per take.

The file that block_pool_delta_listener patches is loaded once per variant, with the
patch's blocks or without. So all variants live in one process and take turns within
each round, in an order drawn anew. The unpatched one is there twice: the difference of
the two is the noise floor. A round counts with its lower quartile; a cost is the median
over the rounds of the difference within a round, with a percentile bootstrap over the
rounds. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import at_least
from kvtax.engine.overlay import build_overlay
from kvtax.patcher.blocks import parse, render
from kvtax.patcher.import_finder import install
from kvtax.stats import Estimate
from kvtax.stats.aims import Aim, judge
from kvtax.stats.distribution import SEED
from kvtax.stats.markdown import number, table
from kvtax.stats.resampling import added

Floats = NDArray[np.float64]

CHUNKS = 8
# The most that a block cached or evicted is meant to cost more, by variant.
AIMS = {
    "nobody": Aim(what="nobody listens", at_most=20.0, unit="ns"),
    "one tracker": Aim(what="one tracker listens", at_most=150.0, unit="ns"),
}
CACHE_SIZES = (1_000, 4_000, 17_000)
REPLACED_BLOCKS = (0, 1, 8, 512)
TAKES = 40


def time_operations(rounds: int) -> dict[str, dict[str, Floats]]:
    """ns per block, by operation and variant, each (rounds, CHUNKS)."""
    order = random.Random(SEED)
    taken: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        # Anew each round: where a variant's objects happen to lie is worth 10 ns.
        pools = {variant: TimedPool(variant) for variant in VARIANTS}
        for pool in pools.values():
            pool.chunk()
        for _ in range(CHUNKS):
            for variant in order.sample(list(VARIANTS), len(VARIANTS)):
                taken[variant].append(pools[variant].chunk())
    shape = (rounds, CHUNKS, len(OPERATIONS))
    by_variant = {name: np.array(ns).reshape(shape) for name, ns in taken.items()}
    return {
        operation: {name: ns[:, :, index] for name, ns in by_variant.items()}
        for index, operation in enumerate(OPERATIONS)
    }


def time_takes(cached_blocks: int, source: Callable[[Any], Any]) -> list[float]:
    """Median us of a take, after each number of REPLACED_BLOCKS."""
    pool, _ = make_pool("nobody", cached_blocks + 1)
    taker = source(pool)
    fill(pool, cached_blocks)
    taker.take()
    medians = []
    for replaced in REPLACED_BLOCKS:
        times_us = []
        for _ in range(TAKES):
            if replaced:
                fill(pool, replaced)
            began = time.perf_counter_ns()
            taker.take()
            times_us.append((time.perf_counter_ns() - began) / 1e3)
        medians.append(float(np.median(times_us)))
    return medians


def operations_table(times_ns: dict[str, dict[str, Floats]]) -> str:
    others = list(VARIANTS)[1:]
    rows = []
    for operation, by_variant in times_ns.items():
        base = by_variant["unpatched"]
        row = [f"`{operation}`", number(float(np.median(base)))]
        for variant in others:
            more = Estimate.of(added(by_variant[variant], base))
            aim = AIMS.get(variant)
            row.append(f"{more:+.1f}" + (f", {judge(more, aim)}" if aim else ""))
        rows.append(row)
    more = [
        f"{name}, our aim: {AIMS[name].bound}" if name in AIMS else name
        for name in others
    ]
    return table(["ns per block", "unpatched", *more], rows)


def takes_table() -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import hash_sync

    rows = []
    for cached_blocks in CACHE_SIZES:
        for source in (hash_sync.BlockHashWalk, hash_sync.BlockHashTracker):
            cells = [number(us, 2) for us in time_takes(cached_blocks, source)]
            rows.append([f"{source.__name__}, {cached_blocks:,} cached", *cells])
    # Each block replaced is one key that goes and one that comes.
    head = [f"{2 * replaced:,} changed keys" for replaced in REPLACED_BLOCKS]
    return table(["us per take", *head], rows)


PATCHES = ["mooncake_hash_sync", "block_pool_delta_listener"]
# What a step of 8,192 prompt tokens caches.
BLOCKS = 512
BLOCK_SIZE = 16
KEY_BYTES, HASH_BYTES = 36, 32
# Patched or not, and how many trackers listen.
VARIANTS = {
    "unpatched": (False, 0),
    "unpatched again": (False, 0),
    "nobody": (True, 0),
    "one tracker": (True, 1),
    "two trackers": (True, 2),
}
OPERATIONS = ("insert", "pop", "cache_full_blocks", "get_new_blocks")


@contextmanager
def patched_vllm() -> Iterator[None]:
    """Within the block `import vllm` finds patched modules."""
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder, "overlay")
        build_overlay(overlay, PATCHES, {})
        install(str(overlay))
        yield


def load_block_pool(patched: bool) -> ModuleType:
    """Make a new module, so that no variant runs code that another has warmed up."""
    from vllm.v1.core import block_pool

    lines, blocks = parse(inspect.getsource(block_pool).encode())
    source = render(lines, blocks if patched else [])
    module = ModuleType(block_pool.__name__)
    exec(compile(source, block_pool.__file__, "exec", dont_inherit=True), vars(module))
    return module


def make_pool(variant: str, num_blocks: int) -> tuple[Any, list[Any]]:
    """Make the variant's block pool, and the trackers that listen to it."""
    from vllm.v1.core.block_pool_listener import BlockHashTracker

    patched, listeners = VARIANTS[variant]
    pool = load_block_pool(patched).BlockPool(num_blocks, True, BLOCK_SIZE)
    return pool, [BlockHashTracker(pool) for _ in range(listeners)]


def fill(pool: Any, num_blocks: int) -> None:
    """Cache `num_blocks` under new keys and free them; the oldest make room."""
    hashes = [os.urandom(HASH_BYTES) for _ in range(num_blocks)]
    blocks = pool.get_new_blocks(num_blocks)
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK_SIZE, 0)
    pool.free_blocks(blocks)


class TimedPool:
    """A full pool of one variant; its operations are timed in chunks of BLOCKS."""

    def __init__(self, variant: str) -> None:
        self._pool, self._trackers = make_pool(variant, BLOCKS + 1)
        fill(self._pool, BLOCKS)

    def chunk(self) -> list[float]:
        """ns per block of each of OPERATIONS; trackers are emptied in between."""
        keys = [os.urandom(KEY_BYTES) for _ in range(BLOCKS)]
        hashes = [os.urandom(HASH_BYTES) for _ in range(BLOCKS)]
        pool, clock = self._pool, time.perf_counter_ns
        request = SimpleNamespace(block_hashes=hashes)
        block_map, blocks = pool.cached_block_hash_to_block, pool.blocks[1:]
        self._take()

        began = clock()
        for key, block in zip(keys, blocks, strict=True):
            block_map.insert(key, block)
        insert_ns = clock() - began
        self._take()
        began = clock()
        for key, block in zip(keys, blocks, strict=True):
            block_map.pop(key, block.block_id)
        pop_ns = clock() - began
        self._take()
        began = clock()
        blocks = pool.get_new_blocks(BLOCKS)
        evict_ns = clock() - began
        self._take()
        began = clock()
        pool.cache_full_blocks(request, blocks, 0, BLOCKS, BLOCK_SIZE, 0)
        cache_ns = clock() - began
        pool.free_blocks(blocks)
        return [ns / BLOCKS for ns in (insert_ns, pop_ns, cache_ns, evict_ns)]

    def _take(self) -> None:
        for tracker in self._trackers:
            tracker.take()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench listener`."""
    parser.add_argument("--rounds", type=at_least(1), default=60)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    with patched_vllm():
        gc.disable()  # so that no round pays for another's garbage
        print(operations_table(time_operations(arguments.rounds)), flush=True)
        print(f"\n{takes_table()}\n")
    print(
        f"{arguments.rounds} rounds of {CHUNKS} x {BLOCKS} blocks of each; more than "
        f"unpatched, with 95 % intervals. Takes: medians of {TAKES}."
    )
    return 0
