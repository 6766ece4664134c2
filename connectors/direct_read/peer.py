# SPDX-License-Identifier: Apache-2.0
"""A reader without an engine, and the peer of a trial that reads with it.

Look up, read into memory of its own, validate, with the connector's own code: one
connection as its scheduler has and one as its worker has. Only the engine of the
reading instance is missing, so that the cost of being read can be measured alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from mooncake.engine import TransferEngine

from connectors.direct_read.client import Client, Connections
from connectors.direct_read.protocol import Offer
from connectors.direct_read.reads import (
    Order,
    Region,
    contiguous_runs,
    order_of,
    read_blocks,
)
from kvtax.load.plan import Plan, bodies, read_plan
from kvtax.records.files import LineFile
from kvtax.records.run import ReadRecord, ReadsHeader
from kvtax.signals import exit_on_signals

# Longer than an instance would wait, because the time itself is measured.
TIMEOUT_S = 20.0


class Read(msgspec.Struct):
    """One read: blocks offered, how many of them were valid, and µs of each part.

    `descriptors` is the number of reads that the transport was given, `order` that of
    the peer's block ids. Without an offer no part but the lookup happened: the others
    are 0, and the order is None.
    """

    t_ns: int
    offered: int
    valid: int
    lookup_us: float
    read_us: float = 0.0
    validate_us: float = 0.0
    descriptors: int = 0
    order: Order | None = None


def places(offer: Offer) -> list[int]:
    """Return where a Reader puts the offer's blocks: in the order of the peer's ids.

    So does an instance whose pool is at the same turn as the peer's; at the opposite
    turn, no two blocks follow each other on both sides.
    """
    place = {peer_id: i for i, peer_id in enumerate(sorted(offer.block_ids))}
    return [place[peer_id] for peer_id in offer.block_ids]


def new_engine() -> TransferEngine:
    """Make a transfer engine over TCP. Raises RuntimeError if there can be none."""
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake cannot use TCP on the loopback interface")
    return engine


class Reader:
    """Reads from the peer whose side channel is at `address`, one read at a time.

    Its memory has room for `max_blocks` blocks. Raises DirectReadError if the peer
    does not answer, RuntimeError if the memory cannot be registered.
    """

    def __init__(
        self,
        engine: TransferEngine,
        address: tuple[str, int],
        secret: str,
        max_blocks: int,
    ) -> None:
        self.engine = engine
        self._address, self._secret = address, secret.encode()
        self._max_blocks = max_blocks
        self._lookups = Connections(self._secret, TIMEOUT_S)
        self._validations = Connections(self._secret, TIMEOUT_S)
        with self._lookups.to(address) as client:
            (theirs,) = client.greeted().workers
        self.session = theirs.session
        self._memory = [
            np.zeros(size * max_blocks, np.uint8) for size in theirs.block_bytes
        ]
        for part in self._memory:
            if engine.register_memory(part.ctypes.data, part.nbytes) != 0:
                raise RuntimeError("Mooncake cannot register the reader's memory")
        self.regions = [
            Region(ours.ctypes.data, address, size)
            for ours, address, size in zip(
                self._memory, theirs.base_addresses, theirs.block_bytes, strict=True
            )
        ]

    def connect(self) -> Client:
        return Client(*self._address, self._secret, TIMEOUT_S)

    def look_up(self, hashes: list[bytes]) -> Offer:
        with self._lookups.to(self._address) as client:
            return client.lookup(hashes[: self._max_blocks])

    def pull(self, offer: Offer) -> int:
        """Read the offer's blocks and return how many leading ones arrived."""
        return read_blocks(
            self.engine,
            self.session,
            self.regions,
            places(offer),
            offer.block_ids,
            lambda: False,
        )

    def validate(self, offer: Offer) -> int:
        with self._validations.to(self._address) as client:
            return client.validate(offer.token)

    def read(self, hashes: list[bytes]) -> Read:
        """Look up, read and validate. Raises DirectReadError if the peer is silent."""
        began_ns = time.perf_counter_ns()
        offer = self.look_up(hashes)
        offered_ns = time.perf_counter_ns()
        lookup_us = (offered_ns - began_ns) / 1e3
        if not offer.block_ids:
            return Read(began_ns, 0, 0, lookup_us)
        arrived = self.pull(offer)
        arrived_ns = time.perf_counter_ns()
        valid = min(self.validate(offer), arrived)
        validated_ns = time.perf_counter_ns()
        num_regions = len(self.regions)
        runs = contiguous_runs(places(offer), offer.block_ids, num_regions)
        return Read(
            began_ns,
            len(offer.block_ids),
            valid,
            lookup_us,
            (arrived_ns - offered_ns) / 1e3,
            (validated_ns - arrived_ns) / 1e3,
            len(runs) * num_regions,
            order_of(offer.block_ids),
        )


# How far beyond the prompt that it read last it asks, once that is gone.
AHEAD = (0, 1, 2, 4, 8, 16, 32)


def prompt_hashes(plan: Plan, block_size: int) -> list[list[list[bytes]]]:
    """Block hashes of each whole prompt, without its last token, as a peer asks.

    A list per reset of the cache, and one for what was sent before. They are those of a
    server with the same PYTHONHASHSEED and the default algorithm.
    """
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    def hashes(prompt: list[int]) -> Iterator[bytes]:
        parent = None
        for end in range(block_size, len(prompt), block_size):
            parent = hash_block_tokens(sha256, parent, prompt[end - block_size : end])
            yield parent

    init_none_hash(sha256)
    bodies_left = bodies(plan)
    passes: list[list[list[bytes]]] = [[]]
    for phase in plan.phases:
        if phase.reset_prefix_cache:
            passes.append([])
        for body in islice(bodies_left, phase.requests):
            prompt = msgspec.json.decode(body)["prompt"]
            # What decodes while a level is held is shorter.
            if len(prompt) >= plan.prompt_tokens:
                passes[-1].append(list(hashes(prompt)))
    return [prompts for prompts in passes if prompts]


def reads(
    reader: Reader, passes: list[list[list[bytes]]], per_s: float
) -> Iterator[Read]:
    """Read `per_s` times a second until the process ends."""
    number = oldest = 0
    due_s = time.monotonic()
    while True:
        asked = [(number, oldest + ahead) for ahead in AHEAD] + [(number + 1, 0)]
        for turn, prompt in asked:
            if turn == len(passes) or prompt >= len(passes[turn]):
                continue
            read = reader.read(passes[turn][prompt])
            if read.offered == len(passes[turn][prompt]):
                number, oldest = turn, prompt
                break
        yield read
        now_s = time.monotonic()
        # Reads that came too late are not made up for in a burst.
        due_s = max(due_s + 1 / per_s, now_s)
        time.sleep(due_s - now_s)


def main() -> None:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    block_size, per_s = int(sys.argv[3]), float(sys.argv[4])
    exit_on_signals()
    passes = prompt_hashes(read_plan(folder / "plan.json"), block_size)
    reader = Reader(
        new_engine(),
        ("127.0.0.1", port),
        os.environ["DIRECT_READ_SECRET"],
        max(len(prompt) for turn in passes for prompt in turn),
    )
    with LineFile(folder / "reads.jsonl", ReadsHeader(reads_per_s=per_s)) as file:
        for read in reads(reader, passes, per_s):
            file.append(ReadRecord(**msgspec.structs.asdict(read)))
            file.flush().result()


if __name__ == "__main__":
    main()
