# SPDX-License-Identifier: Apache-2.0
"""A process that reads from an instance, or looks up, at the rate it is told.

Run by costs.direct_read.cost, over a socket. An error of a read ends the process.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from mooncake.engine import TransferEngine

from connectors.direct_read.client import Client
from connectors.direct_read.reader import Read, Reader, new_engine
from costs.direct_read.cost.rows import Reads
from lab.serving.engine_process import serve


class Loader:
    """Puts one load at a time on instances; all of them share the secret."""

    def __init__(self, engine: TransferEngine, secret: str, max_blocks: int) -> None:
        self._engine, self._secret, self._max_blocks = engine, secret, max_blocks
        self._readers: dict[tuple[str, int], Reader] = {}
        self._clients: dict[tuple[str, int], Client] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._reads: list[Read] = []
        self._began_s = self._cpu_began_s = 0.0

    def reader(self, address: tuple[str, int]) -> Reader:
        if address not in self._readers:
            self._readers[address] = Reader(
                self._engine, address, self._secret, self._max_blocks
            )
        return self._readers[address]

    def client(self, address: tuple[str, int]) -> Client:
        if address not in self._clients:
            self._clients[address] = self.reader(address).connect()
        client = self._clients[address]
        if not client.is_connected():
            client.hello()
        return client

    def start(self, turn: Callable[[], Read], per_s: float) -> None:
        """Take one turn now, then turns in a thread, `per_s` of them at most."""
        turn()
        self._reads = []
        self._stopping.clear()
        self._began_s, self._cpu_began_s = time.perf_counter(), time.process_time()
        self._thread = threading.Thread(target=self._run, args=(turn, per_s))
        self._thread.start()

    def stop(self) -> Reads:
        self._stopping.set()
        self._thread.join()
        reads = self._reads
        return Reads(
            sum(read.offered for read in reads),
            sum(read.valid for read in reads),
            time.perf_counter() - self._began_s,
            time.process_time() - self._cpu_began_s,
            *(
                np.array([getattr(read, part) for read in reads])
                for part in ("lookup_us", "read_us", "validate_us")
            ),
        )

    def _run(self, turn: Callable[[], Read], per_s: float) -> None:
        due_s = time.monotonic()
        try:
            while True:
                now_s = time.monotonic()
                due_s = max(due_s + 1 / per_s, now_s)
                if self._stopping.wait(due_s - now_s):
                    return
                self._reads.append(turn())
        except BaseException:
            # Half a load would be measured as a whole one.
            sys.excepthook(*sys.exc_info())
            os._exit(1)


def begin_reads(
    loader: Loader, address: tuple[str, int], prompts: list[list[bytes]], per_s: float
) -> None:
    """Read whole prompts, one after the other; `per_s` may be infinite."""
    reader, turns = loader.reader(address), itertools.cycle(prompts)
    loader.start(lambda: reader.read(next(turns)), per_s)


def begin_lookups(
    loader: Loader, address: tuple[str, int], hashes: list[bytes]
) -> None:
    """Look the same hashes up over one connection, as fast as they are answered."""
    client = loader.client(address)

    def look_up() -> Read:
        began_ns = time.perf_counter_ns()
        offer = client.lookup(hashes)
        lookup_us = (time.perf_counter_ns() - began_ns) / 1e3
        return Read(began_ns, len(offer.block_ids), 0, lookup_us)

    loader.start(look_up, float("inf"))


def end(loader: Loader) -> Reads:
    return loader.stop()


def main() -> None:
    max_blocks, socket = sys.argv[1:]
    secret = os.environ["DIRECT_READ_SECRET"]
    loader = Loader(new_engine(), secret, int(max_blocks))
    serve(loader, socket, begin_reads, begin_lookups, end)


if __name__ == "__main__":
    main()
