# SPDX-License-Identifier: Apache-2.0
"""The peer that reads prefixes from a measured server, if its connector has one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtax.engine import ServerError
from kvtax.engine.connector import Connector
from kvtax.engine.environment import DIRECT_READ_SECRET, HASH_SEED
from kvtax.engine.server import tail
from kvtax.proc.ports import Ports
from kvtax.proc.supervise import Supervised
from kvtax.records.files import read_lines
from kvtax.records.run import ReadCounts, ReadRecord, ReadsHeader

READY_DEADLINE_S = 60.0


class PeerError(ServerError):
    """The peer did not read; the message says why."""


@contextmanager
def peer(
    folder: Path, connector: Connector, block_size: int, ports: Ports
) -> Iterator[None]:
    """Run the peer of `connector`, which reads until the driver ends.

    Raises PeerError.
    """
    if connector.reads_per_s is None:
        yield
        return
    command = [sys.executable, "-m", "connectors.direct_read.peer", str(folder)]
    command += [str(ports.direct_read), str(block_size), str(connector.reads_per_s)]
    log = folder / "peer.log"
    # Hash seed and secret are the server's.
    shared = {"PYTHONHASHSEED": HASH_SEED, "DIRECT_READ_SECRET": DIRECT_READ_SECRET}
    with Supervised(command, os.environ | shared | connector.env, log) as process:
        deadline_s = time.monotonic() + READY_DEADLINE_S
        while not (folder / "reads.jsonl").exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise PeerError(f"the peer that reads did not start\n{tail(log)}")
            time.sleep(0.1)
        yield
        if (status := process.poll()) is not None:
            raise PeerError(
                f"the peer that reads ended with status {status}\n{tail(log)}"
            )


def count_reads(folder: Path) -> ReadCounts:
    """Count reads and blocks. Raises PeerError if no block was valid."""
    reads = read_lines(folder / "reads.jsonl", ReadsHeader, ReadRecord).records
    began = [read.t_ns for read in reads]
    counts = ReadCounts(
        reads=sum(read.offered > 0 for read in reads),
        blocks_offered=sum(read.offered for read in reads),
        blocks_valid=sum(read.valid for read in reads),
        seconds=(max(began) - min(began)) / 1e9 if began else 0.0,
    )
    if not counts.blocks_valid:
        raise PeerError(
            f"the peer read no valid block in {len(reads)} turns"
            f"\n{tail(folder / 'peer.log')}"
        )
    return counts
