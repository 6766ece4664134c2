# SPDX-License-Identifier: Apache-2.0
"""The descriptors of a KV transfer, by the order of its blocks.

vLLM frees a request's blocks in reverse, so a pool hands out ascending ids in one round
and descending ones in the next. Three parts: how many descriptors each connector makes
in both rounds; how long Mooncake takes to make them, as released and with the patch
`mooncake_sorted_block_groups`, which sorts the pairs of blocks; and how long Mooncake
and NIXL take to transfer the blocks, within one process, from block ids to bytes, with
and without the sort. Times are medians with 95 % intervals, from resampling rounds.
Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtax.engine.installation import Installation
from kvtax.engine.releases import release
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.resampling import over_rounds, ratio
from studies.block_order.worker import BLOCK_TOKENS, LAYERS, ORDERS
from studies.harness import main, publish, rows_table
from studies.results import Variant, at_least, configure_rounds, engines, turns

PATCH = "mooncake_sorted_block_groups"
WORKER = "studies.block_order.worker"
RELEASE = "0.32.0"
CONTEXTS = [1_024 * thousands for thousands in (8, 32, 128)]
MIN_ROUNDS = 4
# Tokens, and bytes per block and layer. 32 KiB is a block of 4 KV heads of 128 in
# 16 bits; 2 KiB keeps the longest prompt within a small machine's memory.
SHORT = 2_048
SIZES = [(CONTEXTS[0], 1 << 15)]
SIZES += [(tokens, 1 << 11) for tokens in (SHORT, *CONTEXTS)]


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
    "Mooncake over TCP, no connection pool": Transport("mooncake", UNPOOLED, SHORT),
    "NIXL over UCX": Transport("nixl"),
}
MOST_MIB = 768
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


class Sent(NamedTuple):
    """One transfer, its time from block ids to bytes."""

    descriptors: int
    ms: float
    accepted: bool


class Transfers(msgspec.Struct):
    """Transfers of a request in one order, without the sort and with it.

    `ms` is None where some were refused, and then `ratio`, without to with, is as well.
    """

    transport: str
    tokens: int
    block_bytes: int
    order: str
    rounds: int
    descriptors: tuple[int, int]
    refused: tuple[int, int]
    ms: tuple[Estimate | None, Estimate | None]
    ratio: Estimate | None


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


def sizes(longest: int, most_mib: int) -> list[tuple[int, int]]:
    """List the sizes of transfers up to that many tokens and MiB."""
    return [
        (tokens, block_bytes)
        for tokens, block_bytes in SIZES
        if tokens <= longest
        and tokens // BLOCK_TOKENS * LAYERS * block_bytes <= most_mib << 20
    ]


def measure_transfers(
    installed: Installation, transport: str, rounds: int, most_mib: int
) -> list[Transfers]:
    """Transfer each size in both orders, without the sort and with it.

    Each has a process of its own: a refused transfer may leave its engine unusable.
    """
    kind, env, longest = TRANSPORTS[transport]
    cases = list(product(ROUND_TRIP, (False, True)))
    variants = {case: Variant([PATCH], env=env) for case in cases}
    made = []
    with engines(WORKER, variants, installed=installed) as processes:
        for size in sizes(longest, most_mib):
            sent: dict[tuple[str, bool], list[Sent]] = {case: [] for case in cases}
            for _, case in turns(sent, 1 + rounds):
                result = processes[case].ask("send", kind, *size, *case)
                sent[case].append(Sent(*result))
            made += [
                transfers(
                    transport,
                    *size,
                    order,
                    (sent[order, False][1:], sent[order, True][1:]),
                )
                for order in ROUND_TRIP
            ]
    return made


def transfers(
    transport: str,
    tokens: int,
    block_bytes: int,
    order: str,
    sent: tuple[list[Sent], list[Sent]],
) -> Transfers:
    """Summarise the transfers of one size in one order."""
    unsorted_ms, sorted_ms = (np.array([one.ms for one in of]) for of in sent)
    first, second = (sum(not one.accepted for one in of) for of in sent)
    return Transfers(
        transport,
        tokens,
        block_bytes,
        order,
        rounds=len(sent[0]),
        descriptors=(sent[0][0].descriptors, sent[1][0].descriptors),
        refused=(first, second),
        ms=(
            None if first else Estimate.of(over_rounds(unsorted_ms[:, None])),
            None if second else Estimate.of(over_rounds(sorted_ms[:, None])),
        ),
        ratio=None if first or second else Estimate.of(ratio(unsorted_ms, sorted_ms)),
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


MAKING = {
    "tokens": "{row.tokens:,}",
    "order": "{row.order}",
    "descriptors, before": "{row.descriptors[0]:,}",
    "after": "{row.descriptors[1]:,}",
    "grouping µs, before": "{row.group_us[0]:,.0f}",
    "grouping µs, after": "{row.group_us[1]:,.0f}",
    "all descriptors µs, before": "{row.describe_us[0]:,.0f}",
    "all descriptors µs, after": "{row.describe_us[1]:,.0f}",
}


def report(rows: list[Row]) -> list[str]:
    """Return the part about making descriptors."""
    return [
        f"{LAYERS} layers, blocks of {BLOCK_TOKENS} tokens, {rows[0].rounds} rounds.",
        rows_table(rows, MAKING),
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
    body = []
    for one in made:
        times = [
            f"{refused} of {one.rounds} refused" if ms is None else f"{ms:,.1f}"
            for ms, refused in zip(one.ms, one.refused, strict=True)
        ]
        size = [f"{one.tokens:,}", f"{one.block_bytes:,}"]
        descriptors = [f"{count:,}" for count in one.descriptors]
        gain = "" if one.ratio is None else f"{one.ratio:.2f}"
        body.append([one.transport, *size, one.order, *descriptors, *times, gain])
    head = ["transport", "tokens", "bytes a block and layer", "order"]
    head += ["descriptors", "sorted", "ms", "sorted", "ms to sorted"]
    return table(head, body)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.block_order`."""
    parser.add_argument("--vllm", default=RELEASE, help=f"default {RELEASE}")
    configure_rounds(parser, "block_order", 40, MIN_ROUNDS)
    parser.add_argument(
        "--transfers",
        type=at_least(MIN_ROUNDS),
        default=2 * MIN_ROUNDS,
        help="rounds of transfers",
    )
    parser.add_argument(
        "--most-mib", type=at_least(12), default=MOST_MIB, help="largest transfer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    installed = release(arguments.vllm)
    rows, counts, hashes = measure(installed, arguments.rounds)
    made: list[Transfers] = []
    for transport in TRANSPORTS:
        made += measure_transfers(
            installed, transport, arguments.transfers, arguments.most_mib
        )
    parts = [report_counts(counts), *report(rows), report_transfers(made)]
    results = {"counts": counts, "rows": rows, "transfers": made}
    return publish("block_order", arguments.out, parts, results, hashes, installed)


def figure(result: dict[str, Any]) -> str:
    """Return the table of a result's transfers."""
    return report_transfers(msgspec.convert(result["transfers"], list[Transfers]))


if __name__ == "__main__":
    main("block_order", __doc__, configure, run)
