# SPDX-License-Identifier: Apache-2.0
"""How long a direct read takes the instance that reads, against the bare engine.

The peer has a block pool, a ledger and a side channel, and no engine that runs. Its
blocks have 32 or 256 KiB and lie in one run or scattered. In each round, in random
order, the same blocks are read over the same session by:

- the connector's own reads;
- one batch_transfer_sync_read with an entry per run;
- one batch_transfer_sync_read with an entry per block.

Then the whole read is timed: look up, read, validate. It is TCP on the loopback
interface, so both processes' threads copy memory. Throughputs are medians over the
rounds; ratios are medians of ratios within a round, with 95 % bootstrap intervals.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

from connectors.direct_read.protocol import Offer
from connectors.direct_read.reader import Read, Reader, new_engine
from connectors.direct_read.reads import contiguous_runs
from costs.direct_read.transfer.report import (
    CONNECTOR,
    RUNS,
    SINGLE,
    Case,
    Row,
    document,
)
from costs.results import quantiles, write_result
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.engine_process import EngineProcess
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED
from lab.stats.interval import Interval
from lab.stats.rounds import ratio

BLOCK_BYTES = (32 << 10, 256 << 10)
BLOCKS = (16, 64, 256)
MIN_ROUNDS = 8
WARM_UP_ROUNDS = 3
PATCHES = ["block_pool_delta_listener"]


def bare_read(reader: Reader, offer: Offer, merged: bool) -> None:
    """The offer's blocks in one synchronous batch. Raises RuntimeError."""
    (region,) = reader.regions
    ids = list(range(len(offer.block_ids)))
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
        raise RuntimeError(f"the bare engine's read ended with {status}")


def connector_read(reader: Reader, offer: Offer) -> None:
    """Raises RuntimeError."""
    if reader.pull(offer) != len(offer.block_ids):
        raise RuntimeError("the connector's read failed")


VARIANTS: dict[str, Callable[[Reader, Offer], None]] = {
    CONNECTOR: connector_read,
    RUNS: lambda reader, offer: bare_read(reader, offer, merged=True),
    SINGLE: lambda reader, offer: bare_read(reader, offer, merged=False),
}


def measure(rounds: int) -> tuple[list[Row], dict[str, str]]:
    """All cases, and the hashes of the patches. Raises RuntimeError."""
    env = load_connector("direct_read_idle").env
    engine, order, rows = new_engine(), random.Random(SEED), []
    for block_bytes in BLOCK_BYTES:
        with (
            tempfile.TemporaryDirectory() as folder,
            EngineProcess(
                Path(folder),
                "costs.direct_read.transfer.peer",
                PATCHES,
                str(block_bytes),
                env=env,
            ) as peer,
        ):
            peer.wait_ready()
            port, prompts = peer.ask("describe")
            address, secret = ("127.0.0.1", port), env["DIRECT_READ_SECRET"]
            reader = Reader(engine, address, secret, max(BLOCKS))
            for layout, blocks in product(prompts, BLOCKS):
                case = Case(block_bytes, layout, blocks)
                rows.append(
                    measure_case(reader, case, prompts[layout][:blocks], rounds, order)
                )
    return rows, peer.patch_hashes


def measure_case(
    reader: Reader, case: Case, hashes: list[bytes], rounds: int, order: random.Random
) -> Row:
    offer = reader.look_up(hashes)
    if len(offer.block_ids) != case.blocks:
        raise RuntimeError(f"the peer offers {len(offer.block_ids)} blocks of {case}")
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    reads: list[Read] = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name in order.sample(list(VARIANTS), len(VARIANTS)):
            began_s = time.perf_counter()
            VARIANTS[name](reader, offer)
            seconds[name].append(time.perf_counter() - began_s)
        reads.append(reader.read(hashes))
    taken = {name: np.array(s[WARM_UP_ROUNDS:]) for name, s in seconds.items()}
    num_bytes = case.block_bytes * case.blocks
    parts = {
        part: np.array([getattr(read, f"{part}_us") for read in reads]) / 1e3
        for part in ("lookup", "read", "validate")
    }
    return Row(
        case=case,
        rounds=rounds,
        runs=len(contiguous_runs(list(range(case.blocks)), offer.block_ids, 1)),
        gb_per_s={
            name: num_bytes / float(np.median(s)) / 1e9 for name, s in taken.items()
        },
        to_bare={
            name: Interval.of(ratio(taken[name], taken[CONNECTOR]))
            for name in (RUNS, SINGLE)
        },
        valid_share=sum(r.valid for r in reads) / (len(reads) * case.blocks),
        read_ms={
            name: quantiles(ms[WARM_UP_ROUNDS:])
            for name, ms in (parts | {"whole": sum(parts.values())}).items()
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.direct_read.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/direct_read_transfer.md")
    )
    arguments = parser.parse_args()
    if arguments.rounds < MIN_ROUNDS:
        parser.error(f"at least {MIN_ROUNDS} rounds")

    exit_on_signals()
    try:
        rows, patch_hashes = measure(arguments.rounds)
    except RuntimeError as error:
        sys.exit(str(error))
    facts = provenance.collect(patch_hashes, "python -m costs.direct_read.transfer")
    text = document(rows, facts)
    write_result(arguments.out, facts | {"rows": rows}, text)
    print(text)


if __name__ == "__main__":
    main()
