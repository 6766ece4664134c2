# SPDX-License-Identifier: Apache-2.0
"""The peer of a trial that serves direct reads: reads the prompts the driver sends.

Run by microbench.trial beside a server that is ready, as `python -m
microbench.direct_read_peer TRIAL_FOLDER PORT BLOCK_SIZE READS_PER_S`, until it is
stopped. PORT is the server's side channel on the loopback interface.

It makes the driver's prompts from the trial's plan and hashes them as vLLM does. At
each turn it asks for the next prompt, and if that is not there yet, reads the newest
that was: so it reads a whole prompt at any |cache|, and what it costs cannot grow with
how much there is to be found. Each read is a line of reads.jsonl (docs/records.md),
whose header says that it began.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from connectors.direct_read.reader import Read, Reader, new_engine
from lab.load.plan import Plan, read_plan
from lab.load.prompts import bodies
from lab.records.line_file import LineFile
from lab.records.reads import ReadRecord, ReadsHeader
from lab.serving.supervise import exit_on_signals


def prompt_hashes(plan: Plan, block_size: int) -> list[list[bytes]]:
    """Block hashes of each prompt, without its last token, as a peer asks for them.

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
    return [list(hashes(msgspec.json.decode(body)["prompt"])) for body in bodies(plan)]


def reads(reader: Reader, prompts: list[list[bytes]], per_s: float) -> Iterator[Read]:
    """Reads as long as it is asked for more, `per_s` in a second."""
    newest = 0
    due_s = time.monotonic()
    while True:
        for index in range(newest, newest + 2)[::-1]:
            if index < len(prompts) and (read := reader.read(prompts[index])).offered:
                newest = index
                break
        yield read
        now_s = time.monotonic()
        # What could not be read in time is not made up for in a burst.
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
