# SPDX-License-Identifier: Apache-2.0
"""The descriptors of a Mooncake transfer, by the order of its blocks.

vLLM frees a request's blocks in reverse, so a pool hands out ascending ids in one round
and descending ones in the next. One process has Mooncake's connector twice: as
released, and with the patch `mooncake_sorted_block_groups`, which sorts the pairs of
blocks. For prompts of 8k to 128k tokens and 48 layers, both make the descriptors of the
same transfer, in an order drawn anew. Nothing is sent: this is what the sender does
before it sends. Times are medians with 95 % intervals, from resampling rounds. Prints
Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from random import Random
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.results import Variant, configure_rounds, engines, publish, turns
from kvtax.engine.before_after import before_and_after
from kvtax.engine.engine_process import serve
from kvtax.stats import Estimate
from kvtax.stats.markdown import table
from kvtax.stats.resampling import over_rounds

PATCH = "mooncake_sorted_block_groups"
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
BLOCK_TOKENS, LAYERS = 16, 48
CONTEXTS = [1_024 * thousands for thousands in (8, 32, 128)]
MIN_ROUNDS = 4
Ids = list[int]


def ascending(blocks: int) -> tuple[Ids, Ids]:
    """Return the blocks of sender and receiver, in the request's order."""
    return list(range(1, 1 + blocks)), list(range(7, 7 + blocks))


def descending(blocks: int) -> tuple[Ids, Ids]:
    """Return the ascending blocks backwards, on both sides."""
    ours, theirs = ascending(blocks)
    return ours[::-1], theirs[::-1]


def mixed(blocks: int) -> tuple[Ids, Ids]:
    """Return blocks of both rounds: the first half descends, the second ascends."""
    ours, theirs = ascending(blocks)
    half = blocks // 2
    return ours[:half][::-1] + ours[half:], theirs[:half][::-1] + theirs[half:]


def opposite(blocks: int) -> tuple[Ids, Ids]:
    """Return ascending blocks of the sender and descending ones of the receiver."""
    ours, theirs = ascending(blocks)
    return ours, theirs[::-1]


ORDERS: dict[str, Callable[[int], tuple[Ids, Ids]]] = {
    order.__name__: order for order in (ascending, descending, mixed, opposite)
}


class Case(NamedTuple):
    tokens: int
    order: str


class Timed(NamedTuple):
    """Descriptors, and µs of the two parts, without the patch and with it."""

    descriptors: tuple[int, int]
    group_us: tuple[float, float]
    describe_us: tuple[float, float]


class Row(msgspec.Struct):
    """One case. A transfer's descriptors are made by `describe`; it calls `group`."""

    tokens: int
    blocks: int
    order: str
    rounds: int
    descriptors: tuple[int, int]
    group_us: tuple[Estimate, Estimate]
    describe_us: tuple[Estimate, Estimate]


def measure(rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Time all cases in each round; return the hashes of the patches as well."""
    found: dict[Case, list[Timed]] = {
        Case(tokens, order): [] for tokens in CONTEXTS for order in ORDERS
    }
    variant = {PATCH: Variant([PATCH])}
    with engines("benchmarks.block_order", variant) as processes:
        for _, case in turns(found, 1 + rounds):
            timed = Timed(*processes[PATCH].ask("time_case", *case))
            found[case].append(timed)
        hashes = processes[PATCH].patch_hashes
    # The first round warms up.
    return [row(case, of[1:]) for case, of in found.items()], hashes


def row(case: Case, timed: list[Timed]) -> Row:
    """Compute a row of a case's rounds."""

    def both(part: str) -> tuple[Estimate, Estimate]:
        us = np.array([getattr(one, part) for one in timed])
        before, after = (Estimate.of(over_rounds(of[:, None])) for of in us.T)
        return before, after

    return Row(
        tokens=case.tokens,
        blocks=case.tokens // BLOCK_TOKENS,
        order=case.order,
        rounds=len(timed),
        descriptors=timed[0].descriptors,
        group_us=both("group_us"),
        describe_us=both("describe_us"),
    )


def report(rows: list[Row]) -> list[str]:
    """Return the parts of the page."""
    body = [
        [
            f"{row.tokens:,}",
            row.order,
            *(f"{count:,}" for count in row.descriptors),
            *(f"{us:,.0f}" for us in (*row.group_us, *row.describe_us)),
        ]
        for row in rows
    ]
    head = ["tokens", "order"]
    for what in ("descriptors", "grouping µs", "all descriptors µs"):
        head += [f"{what}, before", "after"]
    return [
        f"{LAYERS} layers, blocks of {BLOCK_TOKENS} tokens, {rows[0].rounds} rounds.",
        table(head, body),
    ]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench block_order`."""
    configure_rounds(parser, "block_order", 40, MIN_ROUNDS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    rows, hashes = measure(arguments.rounds)
    return publish("block_order", arguments.out, report(rows), {"rows": rows}, hashes)


# The worker: both versions of the connector's module.


class Senders:
    """Mooncake's module before and after the patch, and the order of their turns."""

    def __init__(self) -> None:
        self.modules = before_and_after(MODULE)
        self.chance = Random(0)


def time_case(senders: Senders, tokens: int, order: str) -> list[tuple]:
    """Group and describe one transfer with both versions; return Timed's fields."""
    ours, theirs = ORDERS[order](tokens // BLOCK_TOKENS)
    found: dict[int, tuple[int, float, float]] = {}
    for number in senders.chance.sample(range(2), 2):
        module = senders.modules[number]
        began_ns = time.perf_counter_ns()
        module.group_concurrent_contiguous(ours, theirs)
        grouped_ns = time.perf_counter_ns()
        descriptors = describe(module, ours, theirs)
        ended_ns = time.perf_counter_ns()
        group_us, describe_us = grouped_ns - began_ns, ended_ns - grouped_ns
        found[number] = descriptors, group_us / 1e3, describe_us / 1e3
    return list(zip(found[0], found[1], strict=True))


def describe(module: ModuleType, ours: Ids, theirs: Ids) -> int:
    """Make a transfer's descriptors by the worker's own method; return their number."""
    layers = [layer << 40 for layer in range(1, 1 + LAYERS)]
    worker = SimpleNamespace(kv_caches_base_addr=layers, block_len=1 << 15)
    peer = SimpleNamespace(
        kv_caches_base_addr=layers,
        remote_hostname="127.0.0.1",
        remote_port=1,
        req_blocks={"d": ("t", theirs)},
    )
    ready = [("d", SimpleNamespace(local_block_ids=ours))]
    making = module.MooncakeConnectorWorker._build_transfer_params(worker, ready, peer)
    # It awaits nothing.
    try:
        making.send(None)
    except StopIteration as ended:
        sources, _, lengths, failed = ended.value
    assert sum(lengths) == LAYERS * len(ours) * worker.block_len and not failed
    return len(sources)


if __name__ == "__main__":
    serve(Senders(), sys.argv[-1], time_case)
