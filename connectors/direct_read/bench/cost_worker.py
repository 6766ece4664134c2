# SPDX-License-Identifier: Apache-2.0
"""Processes of `kvtax bench direct_read_cost`: engines that are read, and their peer.

An engine, with an overlay first on PYTHONPATH, has a full prefix cache and is
stepped on demand. The peer reads from an engine, or looks up, at a requested rate; an
error of a read ends it.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mooncake.engine import TransferEngine

from connectors.direct_read.bench.cost import Chunk, Reads
from connectors.direct_read.peer import Read, Reader, new_engine
from connectors.direct_read.server import THREAD_NAME
from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import serve

WARM_UP_STEPS = 50
# For the batch that decodes, and for what a use of the prompts leaves behind: one block
# per prompt that is not full, so not cached, and is reused last.
SPARE_BLOCKS = 16_384
# What peers read: this many prompts of this many blocks. They are used before each
# round, so the batch evicts other blocks.
PROMPTS, PROMPT_BLOCKS = 64, 64
VOCABULARY = 1_000
CALLS = 20_000


class CachingEngine:
    """An engine with room for `blocks` cached blocks, its side channel at `port`."""

    def __init__(self, model: str, connector: str, blocks: str, port: str) -> None:
        from kvtax.engine.null_engine import BLOCK_SIZE, MAX_MODEL_LEN, NullEngine

        transfer = dict(load_connector(connector).kv_transfer_config or {})
        if "kv_connector_extra_config" in transfer:
            transfer["kv_connector_extra_config"] |= {"port": int(port)}
        self.engine = NullEngine(Path(model), transfer, int(blocks) + SPARE_BLOCKS)
        rng = np.random.default_rng(0)
        self._fillers = [
            rng.integers(1, VOCABULARY, MAX_MODEL_LEN - 2).tolist()
            for _ in range(-(-int(blocks) // (MAX_MODEL_LEN // BLOCK_SIZE - 1)))
        ]
        self._prompts = [
            rng.integers(1, VOCABULARY, PROMPT_BLOCKS * BLOCK_SIZE + 1).tolist()
            for _ in range(PROMPTS)
        ]

    def fill(self) -> None:
        """Fill the cache."""
        for prompt in self._fillers:
            self.engine.add(prompt, 1)
        self.engine.run_to_end()

    def use_prompts(self) -> list[list[bytes]]:
        """Cache the prompts, so that they are evicted last; return their hashes."""
        ids = [self.engine.add(prompt, 1) for prompt in self._prompts]
        requests = self.engine.core.scheduler.requests
        hashes = [list(requests[request_id].block_hashes) for request_id in ids]
        self.engine.run_to_end()
        return hashes


def fill(caching: CachingEngine) -> list[list[bytes]]:
    """Fill the cache; return the block hashes of the prompts that can be read."""
    caching.fill()
    return caching.use_prompts()


def use_prompts(caching: CachingEngine) -> None:
    """Keep the prompts from being evicted next."""
    caching.use_prompts()


def time_chunk(caching: CachingEngine, batch: int, steps: int) -> Chunk:
    """Time decode-only steps of one batch."""
    caching.use_prompts()
    engine = caching.engine
    ids = engine.decode_batch(batch, WARM_UP_STEPS + steps)
    engine.time(WARM_UP_STEPS)
    before, began_s = cpu_s(), time.perf_counter()
    step_us = np.array(engine.time(steps))
    seconds = time.perf_counter() - began_s
    spent = {name: spent_s - before[name] for name, spent_s in cpu_s().items()}
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    cached = len(pool.cached_block_hash_to_block)
    engine.core.abort_requests(ids)
    engine.run_to_end()
    return Chunk(step_us, seconds, spent, cached)


def cpu_s() -> dict[str, float]:
    """Return CPU seconds of the engine's thread, the side channel, the transport.

    Threads that Python does not know are Mooncake's: the transport's.
    """
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    kinds = {threading.main_thread().name: "engine", THREAD_NAME: "side channel"}
    spent = {"engine": 0.0, "side channel": 0.0, "transport": 0.0}
    for native_id in map(int, os.listdir("/proc/self/task")):
        name = python.get(native_id)
        kind = "transport" if name is None else kinds.get(name)
        if kind is not None:
            # Its clock, as in the kernel's CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED.
            spent[kind] += time.clock_gettime((~native_id << 3) | 6)
    return spent


def time_calls(caching: CachingEngine, batch: int) -> float:
    """Time the connector's calls of a decode-only step in a tight loop, in us."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = caching.engine
    ids = engine.decode_batch(batch, WARM_UP_STEPS)
    output = engine.core.scheduler.schedule()
    connector, worker = engine.core.scheduler.connector, get_kv_transfer_group()
    worker.bind_connector_metadata(connector.build_connector_meta(output))
    connector.take_events()
    began_ns = time.perf_counter_ns()
    for _ in range(CALLS):
        connector.build_connector_meta(output)
        worker.start_load_kv(None)
        worker.get_finished(set())
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        connector.take_events()
    spent_us = (time.perf_counter_ns() - began_ns) / 1e3 / CALLS
    worker.clear_connector_metadata()
    engine.core.abort_requests(ids)
    engine.run_to_end()
    return spent_us


class Loader:
    """Puts one load at a time on instances; all of them share the secret."""

    def __init__(self, engine: TransferEngine, secret: str, max_blocks: int) -> None:
        self._engine, self._secret, self._max_blocks = engine, secret, max_blocks
        self._readers: dict[tuple[str, int], Reader] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._reads: list[Read] = []
        self._began_s = self._cpu_began_s = 0.0

    def reader(self, address: tuple[str, int]) -> Reader:
        """Return the reader of the instance at `address`."""
        if address not in self._readers:
            self._readers[address] = Reader(
                self._engine, address, self._secret, self._max_blocks
            )
        return self._readers[address]

    def start(self, turn: Callable[[], Read], per_s: float) -> None:
        """Take one turn now, then turns in a thread, `per_s` of them at most."""
        turn()
        self._reads = []
        self._stopping.clear()
        self._began_s, self._cpu_began_s = time.perf_counter(), time.process_time()
        self._thread = threading.Thread(target=self._run, args=(turn, per_s))
        self._thread.start()

    def stop(self) -> Reads:
        """End the load and return its reads."""
        self._stopping.set()
        if self._thread is not None:
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
    reader, cycle = loader.reader(address), itertools.cycle(prompts)
    loader.start(lambda: reader.read(next(cycle)), per_s)


def begin_lookups(
    loader: Loader, address: tuple[str, int], hashes: list[bytes]
) -> None:
    """Look the same hashes up over one connection, as fast as they are answered."""
    client = loader.reader(address).connect()
    client.hello()

    def look_up() -> Read:
        began_ns = time.perf_counter_ns()
        offer = client.lookup(hashes)
        lookup_us = (time.perf_counter_ns() - began_ns) / 1e3
        return Read(began_ns, len(offer.block_ids), 0, lookup_us)

    loader.start(look_up, float("inf"))


def end(loader: Loader) -> Reads:
    """End the load and return its reads."""
    return loader.stop()


def main() -> None:
    match sys.argv[1:]:
        case ["peer", max_blocks, socket]:
            secret = os.environ["DIRECT_READ_SECRET"]
            loader = Loader(new_engine(), secret, int(max_blocks))
            serve(loader, socket, begin_reads, begin_lookups, end)
        case [*options, socket]:
            engine = CachingEngine(*options)
            serve(engine, socket, fill, use_prompts, time_chunk, time_calls)


if __name__ == "__main__":
    main()
