# SPDX-License-Identifier: Apache-2.0
"""Time of a direct read for the instance that reads, beside the bare engine.

The peer has a block pool, a ledger and a side channel, and no engine that runs. Its
blocks have 32 or 256 KiB and lie one after the other, the same backwards, as in every
other round of a pool, or scattered. In each round, in random order, the same blocks are
read over the same session by:

- the connector's own reads;
- one batch_transfer_sync_read with an entry per run;
- one batch_transfer_sync_read with an entry per block.

Then the whole read is timed: look up, read, validate. It is TCP on the loopback
interface, so both processes' threads copy memory. Throughputs are medians over the
rounds; ratios are medians of ratios within a round, with 95 % bootstrap intervals.
Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from connectors.direct_read.peer import Reader, new_engine, places
from connectors.direct_read.protocol import Offer, Peer, WorkerAddress
from connectors.direct_read.reads import contiguous_runs
from kvtax.engine.engine_process import serve
from kvtax.engine.environment import DIRECT_READ_SECRET
from kvtax.report.markdown import number, table
from kvtax.stats import Estimate
from kvtax.stats.resampling import ratio
from kvtax.verdict.aims import Aim, judge
from studies.results import (
    NotMeasured,
    Variant,
    configure_rounds,
    engines,
    publish,
    quantiles,
    turns,
)

CONNECTOR = "connector"
RUNS, SINGLE = "bare, an entry per run", "bare, an entry per block"
AIM = Aim(what="throughput of the connector, to the bare engine", at_least=0.9)


class Case(NamedTuple):
    block_bytes: int
    layout: str
    blocks: int


class Row(msgspec.Struct):
    """One case. Throughputs in GB/s, ratios of the connector's to a bare one's."""

    case: Case
    rounds: int
    runs: int
    gb_per_s: dict[str, float]
    to_bare: dict[str, Estimate]
    valid_share: float
    read_ms: dict[str, dict[str, float]]


BLOCK_BYTES = (32 << 10, 256 << 10)
BLOCKS = (16, 64, 256)
MIN_ROUNDS = 8
WARM_UP_ROUNDS = 3
PATCHES = ["block_pool_delta_listener"]


def bare_read(reader: Reader, offer: Offer, merged: bool) -> None:
    """Read the offer's blocks in one synchronous batch. Raises NotMeasured."""
    (region,) = reader.regions
    ids = places(offer)
    runs = contiguous_runs(ids, offer.block_ids, 1)
    entries = [(run.block_id, run.peer_block_id, run.count) for run in runs]
    if not merged:
        entries = [(*pair, 1) for pair in zip(ids, offer.block_ids, strict=True)]
    size = region.block_bytes
    status = reader.engine.batch_transfer_sync_read(
        reader.session,
        [region.address + ours * size for ours, _, _ in entries],
        [region.peer_address + theirs * size for _, theirs, _ in entries],
        [count * size for _, _, count in entries],
    )
    if status != 0:
        raise NotMeasured(f"the bare engine's read ended with {status}")


def connector_read(reader: Reader, offer: Offer) -> None:
    """Read the offer's blocks by the connector. Raises NotMeasured."""
    if reader.pull(offer) != len(offer.block_ids):
        raise NotMeasured("the connector's read failed")


VARIANTS: dict[str, Callable[[Reader, Offer], None]] = {
    CONNECTOR: connector_read,
    RUNS: lambda reader, offer: bare_read(reader, offer, merged=True),
    SINGLE: lambda reader, offer: bare_read(reader, offer, merged=False),
}


def measure(rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Measure all cases; return the hashes of the patches as well."""
    engine, rows = new_engine(), []
    for block_bytes in BLOCK_BYTES:
        variant = {block_bytes: Variant(PATCHES, (str(block_bytes),))}
        with engines("connectors.direct_read.bench.transfer", variant) as peers:
            peer = peers[block_bytes]
            port, prompts = peer.ask("describe")
            address = "127.0.0.1", port
            reader = Reader(engine, address, DIRECT_READ_SECRET, max(BLOCKS))
            for layout, blocks in product(prompts, BLOCKS):
                case = Case(block_bytes, layout, blocks)
                hashes = prompts[layout][:blocks]
                rows.append(measure_case(reader, case, hashes, rounds))
    return rows, peer.patch_hashes


def measure_case(reader: Reader, case: Case, hashes: list[bytes], rounds: int) -> Row:
    """Read the blocks in all ways, each once per round, then as a whole read."""
    offer = reader.look_up(hashes)
    if len(offer.block_ids) != case.blocks:
        raise NotMeasured(f"the peer offers {len(offer.block_ids)} blocks of {case}")
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _, name in turns(VARIANTS, WARM_UP_ROUNDS + rounds):
        began_s = time.perf_counter()
        VARIANTS[name](reader, offer)
        seconds[name].append(time.perf_counter() - began_s)
    taken = {name: np.array(s[WARM_UP_ROUNDS:]) for name, s in seconds.items()}
    reads = [reader.read(hashes) for _ in range(WARM_UP_ROUNDS + rounds)]
    parts = {
        part: np.array([getattr(read, f"{part}_us") for read in reads]) / 1e3
        for part in ("lookup", "read", "validate")
    }
    num_bytes = case.block_bytes * case.blocks
    return Row(
        case=case,
        rounds=rounds,
        runs=len(contiguous_runs(places(offer), offer.block_ids, 1)),
        gb_per_s={
            name: num_bytes / float(np.median(s)) / 1e9 for name, s in taken.items()
        },
        to_bare={
            name: Estimate.of(ratio(taken[name], taken[CONNECTOR]))
            for name in (RUNS, SINGLE)
        },
        valid_share=sum(r.valid for r in reads) / (len(reads) * case.blocks),
        read_ms={
            name: quantiles(ms[WARM_UP_ROUNDS:])
            for name, ms in (parts | {"whole": np.sum(list(parts.values()), 0)}).items()
        },
    )


def report(rows: list[Row]) -> list[str]:
    """Return the parts of the page."""
    throughput, latency = [], []
    for row in rows:
        label = [f"{row.case.block_bytes >> 10} KiB", row.case.layout]
        label.append(str(row.case.blocks))
        gb_per_s = [number(gb, 2) for gb in row.gb_per_s.values()]
        ratios = [f"{found:.3f}, {judge(found, AIM)}" for found in row.to_bare.values()]
        throughput.append([*label, str(row.runs), *gb_per_s, *ratios])
        times = [
            number(of[q], 2) for of in row.read_ms.values() for q in ("p50", "p99")
        ]
        latency.append([*label, *times, f"{100 * row.valid_share:.1f}"])
    head = ["block", "layout", "blocks"]
    ratios = [f"connector to {name} (aim {AIM.at_least})" for name in (RUNS, SINGLE)]
    times = [f"{part} ms {q}" for part in rows[0].read_ms for q in ("p50", "p99")]
    return [
        f"{rows[0].rounds} rounds of each; GB/s.",
        table([*head, "runs", *rows[0].gb_per_s, *ratios], throughput),
        "The whole read, as the connector does it:",
        table([*head, *times, "% valid"], latency),
    ]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench direct_read_transfer`."""
    configure_rounds(parser, "direct_read_transfer", 200, MIN_ROUNDS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    rows, hashes = measure(arguments.rounds)
    name, parts = "direct_read_transfer", report(rows)
    return publish(name, arguments.out, parts, {"rows": rows}, hashes)


# The worker: the peer that is read.

PROMPT_BLOCKS = 256
BLOCK_SIZE = 16
HASH_BYTES = 32
SCATTERED_AMONG = 4 * PROMPT_BLOCKS


class PeerWithoutEngine:
    """A peer that can be read: block pool, ledger, side channel at `port`.

    `prompts` has the block hashes of a prompt for each layout of its blocks.
    """

    def __init__(self, block_bytes: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        from connectors.direct_read.ledger import BlockLedger
        from connectors.direct_read.server import Server

        # One block is vLLM's null block.
        num_blocks = 1 + 2 * PROMPT_BLOCKS + SCATTERED_AMONG
        self._memory = np.ones(num_blocks * block_bytes, np.uint8)
        self._engine = new_engine()
        address = self._memory.ctypes.data
        if self._engine.register_memory(address, self._memory.nbytes) != 0:
            raise RuntimeError("Mooncake cannot register the peer's memory")
        pool = BlockPool(num_blocks, True, BLOCK_SIZE)
        ledger = BlockLedger(pool)
        self.prompts = {"one after the other": cache(pool)}
        freed = pool.get_new_blocks(PROMPT_BLOCKS)
        others = pool.get_new_blocks(SCATTERED_AMONG)
        pool.free_blocks(reversed(freed))
        self.prompts["backwards"] = cache(pool)
        random.Random(0).shuffle(others)
        pool.free_blocks(others)
        self.prompts["scattered"] = cache(pool)
        ledger.begin_step()
        ledger.finish_step()
        session = f"127.0.0.1:{self._engine.get_rpc_port()}"
        worker = WorkerAddress(session, [address], [block_bytes])
        secret = os.environ["DIRECT_READ_SECRET"].encode()
        self._server = Server(ledger, Peer({}, [worker]), secret)
        self.port = self._server.port


def cache(pool: Any) -> list[bytes]:
    """Cache a prompt; return the hashes of its blocks."""
    hashes = [os.urandom(HASH_BYTES) for _ in range(PROMPT_BLOCKS)]
    blocks = pool.get_new_blocks(PROMPT_BLOCKS)
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, 0, PROMPT_BLOCKS, BLOCK_SIZE, 0)
    return hashes


def describe(instance: PeerWithoutEngine) -> tuple[int, dict[str, list[bytes]]]:
    """Return the port of the side channel, and the prompts' hashes."""
    return instance.port, instance.prompts


if __name__ == "__main__":
    _model, block_bytes, socket = sys.argv[1:]
    serve(PeerWithoutEngine(int(block_bytes)), socket, describe)
