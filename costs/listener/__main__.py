# SPDX-License-Identifier: Apache-2.0
"""What listening to vLLM's block pool costs: ns per block changed, us per take.

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
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costs.listener.pools import (
    BLOCKS,
    OPERATIONS,
    VARIANTS,
    TimedPool,
    fill,
    make_pool,
    patched_vllm,
)
from lab.serving.supervise import exit_on_signals
from lab.stats.aims import Aim, judge
from lab.stats.estimate import SEED
from lab.stats.interval import Interval
from lab.stats.markdown import number, table
from lab.stats.rounds import added

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
            more = Interval.of(added(by_variant[variant], base))
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


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.listener",
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
