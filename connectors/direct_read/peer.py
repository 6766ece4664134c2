# SPDX-License-Identifier: Apache-2.0
"""The peer of a trial that serves direct reads: reads the prompts the driver sends.

Run by microbench.trial beside a server that is ready, as `python -m
connectors.direct_read.peer TRIAL_FOLDER PORT BLOCK_SIZE READS_PER_S`, until it is
stopped. PORT is the server's side channel on the loopback interface.

It makes the driver's prompts from the trial's plan and hashes them as vLLM does; the
short ones of holds are left out. At each turn it reads the oldest prompt since the last
reset that is still there: a whole prompt at any |cache|, and at all levels of a pass
one whose blocks lie alike. What a read costs depends on that: the pool's blocks are
mixed more with every request, and the newest prompt has those that are mixed most.
Each read is a line of reads.jsonl
(docs/records.md), whose header says that it began.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from connectors.direct_read.reader import Read, Reader, new_engine
from kvtax.load.plan import Plan, read_plan
from kvtax.load.prompts import bodies
from kvtax.records.files import LineFile
from kvtax.records.run import ReadRecord, ReadsHeader
from kvtax.signals import exit_on_signals

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
            if len(prompt) == plan.prompt_tokens:
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
        for one, prompt in asked:
            if one == len(passes) or prompt >= len(passes[one]):
                continue
            read = reader.read(passes[one][prompt])
            if read.offered == len(passes[one][prompt]):
                number, oldest = one, prompt
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
        max(len(prompt) for one in passes for prompt in one),
    )
    with LineFile(folder / "reads.jsonl", ReadsHeader(reads_per_s=per_s)) as file:
        for read in reads(reader, passes, per_s):
            file.append(ReadRecord(**msgspec.structs.asdict(read)))
            file.flush().result()


if __name__ == "__main__":
    main()
