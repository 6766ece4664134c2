# SPDX-License-Identifier: Apache-2.0
"""The descriptors of a KV transfer, by the order of its blocks.

vLLM frees a request's blocks in reverse, so a pool hands out ascending ids in one round
and descending ones in the next. Three parts: how many descriptors each connector makes
in both rounds; how long Mooncake takes to make them, as released and with the patch
`mooncake_sorted_block_groups`, which sorts the pairs of blocks; and how long Mooncake
and NIXL take to transfer the blocks, within one process. Times are medians with 95 %
intervals, from resampling rounds. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.block_order_worker import BLOCK_TOKENS, LAYERS, ORDERS
from benchmarks.results import (
    Variant,
    at_least,
    configure_rounds,
    engines,
    publish,
    turns,
)
from kvtax.engine.installation import Installation
from kvtax.engine.releases import release
from kvtax.stats import Estimate
from kvtax.stats.markdown import table
from kvtax.stats.resampling import over_rounds

PATCH = "mooncake_sorted_block_groups"
WORKER = "benchmarks.block_order_worker"
RELEASE = "0.32.0"
CONTEXTS = [1_024 * thousands for thousands in (8, 32, 128)]
MIN_ROUNDS = 4
# Tokens, and bytes per block and layer. 32 KiB is a block of 4 KV heads of 128 in
# 16 bits; 2 KiB keeps the longest prompt within a small machine's memory.
SIZES = [(CONTEXTS[0], 1 << 15), *((tokens, 1 << 11) for tokens in CONTEXTS)]


class Transport(NamedTuple):
    """A transport, its settings, and the longest prompt that it is measured with."""

    kind: str
    env: dict[str, str] | None = None
    longest: int = CONTEXTS[-1]


# Mooncake's pool of connections takes about 2,048 descriptors at a time. Without it,
# each descriptor has a connection of its own.
UNPOOLED = {"MC_TCP_ENABLE_CONNECTION_POOL": "0"}
TRANSPORTS = {
    "Mooncake over TCP": Transport("mooncake"),
    "Mooncake over TCP, no connection pool": Transport(
        "mooncake", UNPOOLED, CONTEXTS[0]
    ),
    "NIXL over UCX": Transport("nixl"),
}
ROUND_TRIP = ("ascending", "descending")


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


class Transfers(msgspec.Struct):
    """Transfers of a request in one order. `ms` is None if some were refused."""

    transport: str
    tokens: int
    block_bytes: int
    order: str
    descriptors: int
    refused: int
    rounds: int
    ms: Estimate | None


def measure(
    installed: Installation, rounds: int
) -> tuple[list[Row], dict[str, dict[str, int]], dict[str, str]]:
    """Time and count the descriptors; return the hashes of the patches as well."""
    found: dict[Case, list[Timed]] = {
        Case(tokens, order): [] for tokens in CONTEXTS for order in ORDERS
    }
    variant = {PATCH: Variant([PATCH])}
    with engines(WORKER, variant, installed=installed) as processes:
        counts = processes[PATCH].ask("count", CONTEXTS[0])
        for _, case in turns(found, 1 + rounds):
            timed = Timed(*processes[PATCH].ask("time_case", *case))
            found[case].append(timed)
        hashes = processes[PATCH].patch_hashes
    # The first round warms up.
    return [row(case, of[1:]) for case, of in found.items()], counts, hashes


def measure_transfers(
    installed: Installation, transport: str, rounds: int
) -> list[Transfers]:
    """Transfer each size in both orders, each order in a process of its own.

    A refused transfer may leave its engine unusable for the next.
    """
    kind, env, longest = TRANSPORTS[transport]
    variants = {order: Variant([PATCH], env=env) for order in ROUND_TRIP}
    made = []
    with engines(WORKER, variants, installed=installed) as processes:
        for size in (size for size in SIZES if size[0] <= longest):
            sent: dict[str, list[tuple[int, float, bool]]] = {
                order: [] for order in ROUND_TRIP
            }
            for _, order in turns(sent, 1 + rounds):
                result = processes[order].ask("send", kind, *size, order)
                sent[order].append(result)
            made += [
                transfers(transport, *size, order, results[1:])
                for order, results in sent.items()
            ]
    return made


def transfers(
    transport: str,
    tokens: int,
    block_bytes: int,
    order: str,
    sent: list[tuple[int, float, bool]],
) -> Transfers:
    """Summarise the transfers of one size in one order."""
    times_ms = np.array([ms for _, ms, accepted in sent if accepted])
    refused = len(sent) - len(times_ms)
    return Transfers(
        transport,
        tokens,
        block_bytes,
        order,
        descriptors=sent[0][0],
        refused=refused,
        rounds=len(sent),
        ms=None if refused else Estimate.of(over_rounds(times_ms[:, None])),
    )


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
    """Return the part about making descriptors."""
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


def report_counts(counts: dict[str, dict[str, int]]) -> str:
    """Return the table of descriptors by connector and round of the pool."""
    body = [
        [name, *(f"{of[order]:,}" for order in ROUND_TRIP)]
        for name, of in counts.items()
    ]
    return table([f"descriptors, {CONTEXTS[0]:,} tokens", *ROUND_TRIP], body)


def report_transfers(made: list[Transfers]) -> str:
    """Return the table of transfers."""
    body = [
        [
            one.transport,
            f"{one.tokens:,}",
            f"{one.block_bytes:,}",
            one.order,
            f"{one.descriptors:,}",
            f"{one.refused} of {one.rounds} refused"
            if one.ms is None
            else f"{one.ms:,.1f}",
        ]
        for one in made
    ]
    head = ["transport", "tokens", "bytes a block and layer", "order"]
    return table([*head, "descriptors", "ms"], body)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench block_order`."""
    parser.add_argument("--vllm", default=RELEASE, help=f"default {RELEASE}")
    configure_rounds(parser, "block_order", 40, MIN_ROUNDS)
    parser.add_argument(
        "--transfers", type=at_least(1), default=8, help="rounds of transfers"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    installed = release(arguments.vllm)
    rows, counts, hashes = measure(installed, arguments.rounds)
    made: list[Transfers] = []
    for transport in TRANSPORTS:
        made += measure_transfers(installed, transport, arguments.transfers)
    parts = [report_counts(counts), *report(rows), report_transfers(made)]
    results = {"counts": counts, "rows": rows, "transfers": made}
    return publish("block_order", arguments.out, parts, results, hashes, installed)
