# SPDX-License-Identifier: Apache-2.0
"""Mooncake's queue of a TCP peer, by descriptors and by bytes (Mooncake #4063, #4209).

    python -m studies.threads.tcp_queue     # two minutes, on a quiet machine

Two processes on this host; a batch goes from one to the other in `CALLS` calls, of
which the median counts. In each round all batches take turns in a random order, each
between new processes. The queue's limit is in descriptors: 1,024 as released, or more
(`MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtax.paths import REPOSITORY
from kvtax.stats import Estimate
from kvtax.stats.quantiles import median_of_passes
from studies.harness import main, publish, rows_table
from studies.results import configure_rounds, turns

MODULE = "studies.threads.tcp_queue"
HOST = "127.0.0.1"
LIMIT = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
CALLS, ROUNDS = 3, 6


class Batch(NamedTuple):
    """Descriptors of `kib` each, at a limit of waiting descriptors (0: as released)."""

    limit: int
    descriptors: int
    kib: int


BATCHES = (
    Batch(0, 2_048, 2),
    Batch(0, 2_304, 2),
    Batch(65_535, 2_304, 2),
    Batch(65_535, 6_144, 2),
    Batch(65_535, 6_144, 16),
    Batch(65_535, 6_144, 64),
    Batch(65_535, 24_576, 2),
    Batch(65_535, 24_576, 16),
)


class Row(msgspec.Struct):
    """Calls of a batch that passed, of all, and how long a call takes."""

    limit: int
    descriptors: int
    kib: int
    passed: int
    calls: int
    ms: Estimate


COLUMNS = {
    "limit": "{row.limit:,}",
    "descriptors": "{row.descriptors:,}",
    "KiB of each": "{row.kib}",
    "calls that pass": "{row.passed} of {row.calls}",
    "ms": "{row.ms:,.0f}",
}


def receive(size: int) -> None:
    """Register memory, print where it is, and wait until the input ends."""
    from mooncake.engine import TransferEngine

    memory, engine = np.zeros(size, np.uint8), TransferEngine()
    _start(engine, memory)
    print(f"\n{engine.get_rpc_port()} {memory.ctypes.data}", flush=True)
    sys.stdin.read()


def send(batch: Batch) -> list[tuple[bool, float]]:
    """Return for each call whether it passed, and ms."""
    from mooncake.engine import TransferEngine

    size = batch.kib * 1024
    source = np.zeros(batch.descriptors * size, np.uint8)
    command = [sys.executable, "-m", MODULE, "--receive", str(source.nbytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as receiver:
        assert receiver.stdout is not None
        places = (line.split() for line in receiver.stdout)
        port, target = next(p for p in places if len(p) == 2 and p[0].isdigit())
        engine = TransferEngine()
        _start(engine, source)
        offsets = np.arange(batch.descriptors, dtype=np.int64) * size
        ours, theirs = (
            (base + offsets).tolist() for base in (source.ctypes.data, int(target))
        )
        calls = []
        for _ in range(CALLS):
            began_s = time.perf_counter()
            status = engine.batch_transfer_sync_write(
                f"{HOST}:{port}", ours, theirs, [size] * batch.descriptors
            )
            calls.append((status == 0, (time.perf_counter() - began_s) * 1e3))
        receiver.communicate()
    return calls


def _start(engine: Any, memory: npt.NDArray[np.uint8]) -> None:
    failed = engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
    failed |= engine.batch_register_memory([memory.ctypes.data], [memory.nbytes])
    if failed:
        raise RuntimeError("Mooncake's engine does not start: see its log above")


def measure(rounds: int) -> list[Row]:
    """Send all batches in turn, each between new processes."""
    calls: dict[Batch, list[list[tuple[bool, float]]]] = {b: [] for b in BATCHES}
    for _, batch in turns(BATCHES, rounds):
        env = {key: value for key, value in os.environ.items() if key != LIMIT}
        if batch.limit:
            env[LIMIT] = str(batch.limit)
        command = [sys.executable, "-m", MODULE, "--send", *map(str, batch)]
        done = subprocess.run(
            command, env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
        )
        calls[batch].append(json.loads(done.stdout.splitlines()[-1]))
    return [_row(batch, of_batch) for batch, of_batch in calls.items()]


def _row(batch: Batch, rounds: list[list[tuple[bool, float]]]) -> Row:
    medians = [float(np.median([ms for _, ms in of_round])) for of_round in rounds]
    passed = [ok for of_round in rounds for ok, _ in of_round]
    return Row(
        batch.limit or 1_024,
        batch.descriptors,
        batch.kib,
        sum(passed),
        len(passed),
        Estimate.of(median_of_passes(np.array(medians)), 1),
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.threads.tcp_queue`."""
    configure_rounds(parser, "tcp_queue", ROUNDS, minimum=6)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--send", type=int, nargs=3, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    if arguments.receive is not None:
        receive(arguments.receive)
        return 0
    if arguments.send is not None:
        print("\n" + json.dumps(send(Batch(*arguments.send))))
        return 0
    rows = measure(arguments.rounds)
    parts = [rows_table(rows, COLUMNS)]
    return publish("threads.tcp_queue", arguments.out, parts, {"rows": rows}, {})


if __name__ == "__main__":
    main("threads.tcp_queue", __doc__, configure, run)
