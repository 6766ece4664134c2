# SPDX-License-Identifier: Apache-2.0
"""A peer that can be read and has no engine: block pool, ledger, side channel.

Run by costs.direct_read.transfer with a private tree first on PYTHONPATH. The blocks of
one of its prompts lie one after the other; those of the other prompt are scattered.
"""

from __future__ import annotations

import os
import random
import sys
from types import SimpleNamespace

import numpy as np
from vllm.v1.core.block_pool import BlockPool

from connectors.direct_read.ledger import BlockLedger
from connectors.direct_read.protocol import Peer, WorkerAddress
from connectors.direct_read.reader import new_engine
from connectors.direct_read.server import Server
from lab.serving.engine_process import serve

PROMPT_BLOCKS = 256
BLOCK_SIZE = 16
HASH_BYTES = 32
SCATTERED_AMONG = 4 * PROMPT_BLOCKS


class PeerWithoutEngine:
    """`prompts` has the block hashes of both prompts; the side channel is at `port`."""

    def __init__(self, block_bytes: int) -> None:
        # One block is vLLM's null block.
        num_blocks = 1 + PROMPT_BLOCKS + SCATTERED_AMONG
        self._memory = np.ones(num_blocks * block_bytes, np.uint8)
        self._engine = new_engine()
        address = self._memory.ctypes.data
        if self._engine.register_memory(address, self._memory.nbytes) != 0:
            raise RuntimeError("Mooncake cannot register the peer's memory")
        pool = BlockPool(num_blocks, True, BLOCK_SIZE)
        ledger = BlockLedger(pool)
        self.prompts = {"one after the other": cache(pool)}
        others = pool.get_new_blocks(SCATTERED_AMONG)
        random.Random(0).shuffle(others)
        pool.free_blocks(others)
        self.prompts["scattered"] = cache(pool)
        ledger.begin_step()
        ledger.finish_step()
        session = f"127.0.0.1:{self._engine.get_rpc_port()}"
        worker = WorkerAddress(session, [address], [block_bytes])
        secret = os.environ["DIRECT_READ_SECRET"].encode()
        self._server = Server(ledger, Peer({}, [worker]), secret)
        self.port = self._server.port


def cache(pool: BlockPool) -> list[bytes]:
    """Cache a prompt; the hashes of its blocks."""
    hashes = [os.urandom(HASH_BYTES) for _ in range(PROMPT_BLOCKS)]
    blocks = pool.get_new_blocks(PROMPT_BLOCKS)
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, 0, PROMPT_BLOCKS, BLOCK_SIZE, 0)
    return hashes


def describe(instance: PeerWithoutEngine) -> tuple[int, dict[str, list[bytes]]]:
    return instance.port, instance.prompts


def main() -> None:
    _model, block_bytes, socket = sys.argv[1:]
    serve(PeerWithoutEngine(int(block_bytes)), socket, describe)


if __name__ == "__main__":
    main()
