# SPDX-License-Identifier: Apache-2.0
"""The peer of a trial that serves direct reads: reads the prompts the driver sends.

Run by microbench.trial beside a server that is ready, as `python -m
microbench.direct_read_peer TRIAL_FOLDER PORT BLOCK_SIZE READS_PER_S`, until it is
stopped. PORT is the server's side channel on the loopback interface.

It makes the driver's prompts from the trial's plan and hashes them as vLLM does; the
short ones of holds are left out. At each turn it asks for the next prompt, and if that
is not there yet, reads the newest that was: so it reads a whole prompt at any |cache|,
and what it costs cannot grow with how much there is to be found. After a reset neither
is there, and it asks for later ones. Each read is a line of reads.jsonl
(docs/records.md), whose header says that it began.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from connectors.direct_read.reader import Read, Reader, new_engine
from kvtax.load.plan import Plan, read_plan
from kvtax.load.prompts import bodies
from kvtax.records.files import LineFile
from kvtax.records.run import ReadRecord, ReadsHeader
from kvtax.signals import exit_on_signals

# How far beyond the newest prompt it asks, in this order.
AHEAD = (1, 0, 2, 4, 8, 16, 32)


def prompt_hashes(plan: Plan, block_size: int) -> list[list[bytes]]:
    """Block hashes of each whole prompt, without its last token, as a peer asks.

    They are those of a server with the same PYTHONHASHSEED and the default algorithm.
    """
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    def hashes(prompt: list[int]) -> Iterator[bytes]:
        parent = None
        for end in range(block_size, len(prompt), block_size):
            parent = hash_block_tokens(sha256, parent, prompt[end - block_size : end])
            yield parent

    init_none_hash(sha256)
    prompts = (msgspec.json.decode(body)["prompt"] for body in bodies(plan))
    return [list(hashes(one)) for one in prompts if len(one) == plan.prompt_tokens]


def reads(reader: Reader, prompts: list[list[bytes]], per_s: float) -> Iterator[Read]:
    """Read `per_s` times a second until the process ends."""
    newest = 0
    due_s = time.monotonic()
    while True:
        for index in (newest + ahead for ahead in AHEAD):
            if index < len(prompts) and (read := reader.read(prompts[index])).offered:
                newest = index
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
    prompts = prompt_hashes(read_plan(folder / "plan.json"), block_size)
    reader = Reader(
        new_engine(),
        ("127.0.0.1", port),
        os.environ["DIRECT_READ_SECRET"],
        max(map(len, prompts)),
    )
    with LineFile(folder / "reads.jsonl", ReadsHeader(reads_per_s=per_s)) as file:
        for read in reads(reader, prompts, per_s):
            file.append(ReadRecord(**msgspec.structs.asdict(read)))
            file.flush().result()


if __name__ == "__main__":
    main()
