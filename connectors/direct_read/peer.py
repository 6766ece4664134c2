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

from connectors.direct_read.client import Connections
from connectors.direct_read.reads import Region, read_blocks
from kvtax.load.plan import Plan, bodies, read_plan
from kvtax.records.files import LineFile
from kvtax.records.run import ReadRecord, ReadsHeader
from kvtax.signals import exit_on_signals

# Longer than an instance would wait, because the time itself is measured.
TIMEOUT_S = 20.0


class Reader:
    """Reads from the peer whose side channel is at `address`, one read at a time.

    Its memory has room for `max_blocks` blocks. Raises DirectReadError if the peer
    does not answer, RuntimeError if Mooncake cannot use TCP or the memory.
    """

    def __init__(self, address: tuple[str, int], secret: str, max_blocks: int) -> None:
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake cannot use TCP on the loopback interface")
        self._address, self._max_blocks = address, max_blocks
        self._lookups = Connections(secret.encode(), TIMEOUT_S)
        self._validations = Connections(secret.encode(), TIMEOUT_S)
        with self._lookups.to(address) as client:
            (theirs,) = client.greeted().workers
        self._session = theirs.session
        self._memory = [
            np.zeros(size * max_blocks, np.uint8) for size in theirs.block_bytes
        ]
        for part in self._memory:
            if self._engine.register_memory(part.ctypes.data, part.nbytes) != 0:
                raise RuntimeError("Mooncake cannot register the reader's memory")
        self._regions = [
            Region(ours.ctypes.data, base, size)
            for ours, base, size in zip(
                self._memory, theirs.base_addresses, theirs.block_bytes, strict=True
            )
        ]

    def read(self, hashes: list[bytes]) -> ReadRecord:
        """Look up, read and validate. Raises DirectReadError if the peer is silent."""
        began_ns = time.perf_counter_ns()
        with self._lookups.to(self._address) as client:
            offer = client.lookup(hashes[: self._max_blocks])
        if not offer.block_ids:
            return ReadRecord(t_ns=began_ns, offered=0, valid=0)
        # In the order of the peer's ids, as an instance does at the same turn of its
        # pool.
        place = {peer_id: at for at, peer_id in enumerate(sorted(offer.block_ids))}
        block_ids = [place[peer_id] for peer_id in offer.block_ids]
        arrived = read_blocks(
            self._engine,
            self._session,
            self._regions,
            block_ids,
            offer.block_ids,
            lambda: False,
        )
        with self._validations.to(self._address) as client:
            valid = min(client.validate(offer.token), arrived)
        return ReadRecord(t_ns=began_ns, offered=len(offer.block_ids), valid=valid)


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
) -> Iterator[ReadRecord]:
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
    most_blocks = max(len(prompt) for turn in passes for prompt in turn)
    secret = os.environ["DIRECT_READ_SECRET"]
    reader = Reader(("127.0.0.1", port), secret, most_blocks)
    with LineFile(folder / "reads.jsonl", ReadsHeader(reads_per_s=per_s)) as file:
        for read in reads(reader, passes, per_s):
            file.append(read)
            file.flush().result()


if __name__ == "__main__":
    main()
