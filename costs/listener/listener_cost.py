# SPDX-License-Identifier: Apache-2.0
"""What listening to vLLM's block pool costs: ns a block cached or evicted, us a take.

The file that block_pool_delta_listener patches is loaded once a variant, with the
patch's blocks and without, so all variants live in one process and take turns within
each round, in an order drawn anew. The unpatched one is there twice: the difference of
the two is the noise floor. A round counts with its lower quartile, a cost is the
median over the rounds of the difference within a round, with a percentile bootstrap
over the rounds, as in costs.hooks.overhead. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockpatch.blocks import parse, render
from costs.hooks.overhead import SEED, cost, verdict
from lab.serving.supervise import exit_on_signals
from lab.serving.tree import build_tree, installed_package
from lab.stats.markdown import number, table

Floats = NDArray[np.float64]

PATCHES = ["mooncake_hash_sync", "block_pool_delta_listener"]
# What a step of 8,192 prompt tokens caches.
BLOCKS = 512
BLOCK_SIZE = 16
CHUNKS = 8
KEY_BYTES, HASH_BYTES = 36, 32
AIM_NS = {"nobody": 20.0, "one tracker": 150.0}
# Patched or not, and how many trackers listen.
VARIANTS = {
    "unpatched": (False, 0),
    "unpatched again": (False, 0),
    "nobody": (True, 0),
    "one tracker": (True, 1),
    "two trackers": (True, 2),
}
OPERATIONS = ("insert", "pop", "cache_full_blocks", "get_new_blocks")
CACHE_SIZES = (1_000, 4_000, 17_000)
REPLACED_BLOCKS = (0, 1, 8, 512)
TAKES = 40


@contextmanager
def patched_vllm() -> Iterator[None]:
    """`import vllm` gives a private patched tree, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        build_tree(tree, installed_package("vllm"), PATCHES, {})
        sys.path.insert(0, str(tree))
        yield


def load_block_pool(patched: bool) -> ModuleType:
    """A module of its own: no variant runs code that another has warmed up."""
    from vllm.v1.core import block_pool

    lines, blocks = parse(Path(block_pool.__file__).read_bytes())
    source = render(lines, blocks if patched else [])
    module = ModuleType(block_pool.__name__)
    exec(compile(source, block_pool.__file__, "exec", dont_inherit=True), vars(module))
    return module


def make_pool(variant: str, num_blocks: int) -> tuple[Any, list[Any]]:
    """The variant's block pool, and who listens to it."""
    from vllm.v1.core.block_pool_listener import BlockHashTracker

    patched, listeners = VARIANTS[variant]
    pool = load_block_pool(patched).BlockPool(num_blocks, True, BLOCK_SIZE)
    return pool, [BlockHashTracker(pool) for _ in range(listeners)]


def fill(pool: Any, num_blocks: int) -> None:
    """Cache that many blocks under new keys, the oldest making room, and free them."""
    hashes = [os.urandom(HASH_BYTES) for _ in range(num_blocks)]
    blocks = pool.get_new_blocks(num_blocks)
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK_SIZE, 0)
    pool.free_blocks(blocks)


class Subject:
    """A full pool of one variant, whose operations are timed a chunk at a time."""

    def __init__(self, variant: str) -> None:
        self._pool, self._trackers = make_pool(variant, BLOCKS + 1)
        fill(self._pool, BLOCKS)

    def chunk(self) -> list[float]:
        """ns a block of each of OPERATIONS; the trackers are emptied in between."""
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


def time_operations(rounds: int) -> dict[str, dict[str, Floats]]:
    """ns a block by operation and variant, each (rounds, CHUNKS)."""
    order = random.Random(SEED)
    taken: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        # Anew each round: where a variant's objects happen to lie is worth 10 ns.
        subjects = {variant: Subject(variant) for variant in VARIANTS}
        for subject in subjects.values():
            subject.chunk()
        for _ in range(CHUNKS):
            for variant in order.sample(list(VARIANTS), len(VARIANTS)):
                taken[variant].append(subjects[variant].chunk())
    shape = (rounds, CHUNKS, len(OPERATIONS))
    by_variant = {name: np.array(ns).reshape(shape) for name, ns in taken.items()}
    return {
        operation: {name: ns[:, :, index] for name, ns in by_variant.items()}
        for index, operation in enumerate(OPERATIONS)
    }


def time_takes(cached_blocks: int, source: Callable[[Any], Any]) -> list[float]:
    """us of a take (median), after each of REPLACED_BLOCKS."""
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
    rows = []
    for operation, by_variant in times_ns.items():
        base = by_variant["unpatched"]
        row = [f"`{operation}`", number(float(np.median(base)))]
        for variant in list(VARIANTS)[1:]:
            more = cost(by_variant[variant], base)
            aim = AIM_NS.get(variant)
            word = "" if aim is None else f", {verdict(more, aim)}"
            row.append(f"{more}{word}")
        rows.append(row)
    aims = {name: f", aim {ns:g}" for name, ns in AIM_NS.items()}
    more = [f"{name}{aims.get(name, '')}" for name in list(VARIANTS)[1:]]
    return table(["ns a block", "unpatched", *more], rows)


def takes_table() -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import hash_sync

    rows = []
    for cached_blocks in CACHE_SIZES:
        for source in (hash_sync.BlockHashWalk, hash_sync.BlockHashTracker):
            cells = [number(us, 2) for us in time_takes(cached_blocks, source)]
            rows.append([f"{source.__name__}, {cached_blocks:,} cached", *cells])
    # Each block replaced is one key that goes and one that comes.
    head = [f"{2 * replaced:,} changed keys" for replaced in REPLACED_BLOCKS]
    return table(["us a take", *head], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.listener.listener_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("at least 1 round")
    exit_on_signals()
    with patched_vllm():
        gc.disable()  # so that no round pays for another's garbage
        print(operations_table(time_operations(arguments.rounds)), flush=True)
        print(f"\n{takes_table()}\n")
    print(
        f"{arguments.rounds} rounds of {CHUNKS} x {BLOCKS} blocks of each; more than "
        f"unpatched, with 95 % intervals. Takes: medians of {TAKES}."
    )


if __name__ == "__main__":
    main()
