# SPDX-License-Identifier: Apache-2.0
"""The worker of `python -m studies.block_order`: descriptors, and transfers of blocks.

Block ids are those of vLLM's own pool. Each connector's own function makes the
descriptors, on an object that has the attributes which that function reads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np

from kvtax.engine.engine_process import serve
from tests.harness.before_after import before_and_after

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
MOONCAKE = f"{CONNECTORS}.mooncake.mooncake_connector"
BLOCK_TOKENS, LAYERS = 16, 48
BLOCK_BYTES = 1 << 15
HOST = "127.0.0.1"
Ids = list[int]
# Addresses and sizes: of the sender, of the receiver, bytes.
Descriptors = tuple[Ids, Ids, Ids]


def ascending(blocks: int) -> tuple[Ids, Ids]:
    """Return the blocks of sender and receiver, in the request's order."""
    return list(range(1, 1 + blocks)), list(range(1, 1 + blocks))


def descending(blocks: int) -> tuple[Ids, Ids]:
    """Return the ascending blocks backwards, on both sides."""
    ours, theirs = ascending(blocks)
    return ours[::-1], theirs[::-1]


def mixed(blocks: int) -> tuple[Ids, Ids]:
    """Return blocks of both rounds: the first half descends, the second ascends."""
    ours, theirs = ascending(blocks)
    half = blocks // 2
    return ours[:half][::-1] + ours[half:], theirs[:half][::-1] + theirs[half:]


def opposite(blocks: int) -> tuple[Ids, Ids]:
    """Return ascending blocks of the sender and descending ones of the receiver."""
    ours, theirs = ascending(blocks)
    return ours, theirs[::-1]


ORDERS: dict[str, Callable[[int], tuple[Ids, Ids]]] = {
    order.__name__: order for order in (ascending, descending, mixed, opposite)
}


def rounds_of_a_pool(blocks: int) -> dict[str, Ids]:
    """Return the ids of two requests that have vLLM's block pool to themselves."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(1 + blocks, True, BLOCK_TOKENS)
    ids = []
    for _ in range(2):
        request = pool.get_new_blocks(blocks)
        ids.append([block.block_id for block in request])
        # As the KV cache manager frees a request: its last block first.
        pool.free_blocks(reversed(request))
    return dict(zip(("ascending", "descending"), ids, strict=True))


def mooncake(
    module: ModuleType, ours: Ids, theirs: Ids, from_: Ids, to: Ids, size: int
) -> Descriptors:
    """Make a transfer's descriptors by Mooncake's worker."""
    group = SimpleNamespace(kv_cache_spec=None)
    worker = SimpleNamespace(
        kv_cache_config=SimpleNamespace(transfer_groups=[group]),
        _logical_to_kernel_block_ids=lambda ids: ids,
        _get_sender_transfer_plan=lambda **_: (True, 0, 0, size),
    )
    regions = [
        [module.TransferRegion("", layer, base, size, size) for layer, base in side]
        for side in (enumerate(from_), enumerate(to))
    ]
    peer = SimpleNamespace(
        remote_hostname=HOST,
        remote_port=1,
        remote_tp_rank=0,
        remote_tp_size=1,
        req_blocks={"d": ("t", [theirs])},
    )
    ready = [("d", SimpleNamespace(local_block_ids=[ours]))]
    making = module.MooncakeConnectorWorker._build_transfer_params(
        worker, ready, peer, *regions
    )
    # It awaits nothing.
    try:
        making.send(None)
    except StopIteration as ended:
        sources, targets, lengths, failed, _ = ended.value
    assert sum(lengths) == len(from_) * len(ours) * size and not failed
    return sources, targets, lengths


def sort_pairs(sources: Ids, targets: Ids) -> tuple[Ids, Ids]:
    """Sort pairs of blocks by their source, as the patch does for Mooncake."""
    order = np.lexsort((targets, sources))
    return np.array(sources)[order].tolist(), np.array(targets)[order].tolist()


def nixl_ids(ids: Ids, pool_blocks: int) -> np.ndarray:
    """Return the numbers of a request's descriptors, by NIXL's worker."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    worker = SimpleNamespace(
        _has_mamba=False,
        _transfer_layer_group_ids=[],
        num_regions=LAYERS,
        region_group_ids=[0] * LAYERS,
        _uses_region_group_mapping=False,
    )
    return base_worker.NixlBaseConnectorWorker._compute_desc_ids(
        worker, [ids], pool_blocks, None, 1
    )


# Descriptors of each connector, with the same ids on both sides.


def bases(count: int = LAYERS) -> Ids:
    """Return made-up addresses of layers that do not touch."""
    return [layer << 40 for layer in range(1, 1 + count)]


def count_mooncake(worker: Worker, ids: Ids) -> int:
    before, _ = worker.modules
    return len(mooncake(before, ids, ids, bases(), bases(), BLOCK_BYTES)[0])


def count_mooncake_sorted(worker: Worker, ids: Ids) -> int:
    _, after = worker.modules
    return len(mooncake(after, ids, ids, bases(), bases(), BLOCK_BYTES)[0])


def count_moriio(_: Worker, ids: Ids) -> int:
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_connector

    merge = moriio_connector.MoRIIOConnectorWorker.merge_contiguous_blocks
    offsets = [block * BLOCK_BYTES for block in ids]
    merged, _, _ = merge(None, offsets, offsets, [BLOCK_BYTES] * len(ids))
    return LAYERS * len(merged)


def count_direct_read(_: Worker, ids: Ids) -> int:
    from connectors.direct_read.reads import contiguous_runs

    return LAYERS * len(contiguous_runs(ids, ids, LAYERS))


def count_nixl(_: Worker, ids: Ids) -> int:
    return len(nixl_ids(ids, 1 + max(ids)))


def count_nixl_sorted(worker: Worker, ids: Ids) -> int:
    return count_nixl(worker, sort_pairs(ids, ids)[0])


def count_store(_: Worker, ids: Ids) -> int:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

    layout = SimpleNamespace(
        kv_caches_base_addr=bases(),
        block_len=[BLOCK_BYTES],
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )
    starts = range(0, len(ids) * BLOCK_TOKENS, BLOCK_TOKENS)
    chunks = [(start, start + BLOCK_TOKENS) for start in starts]
    addresses, _, _ = data.RankLocalStoreLayout.prepare_values(
        layout, chunks, ids, [0] * len(chunks)
    )
    return sum(map(len, addresses))


def count_offloading(_: Worker, ids: Ids) -> int:
    import torch
    from vllm.v1.kv_offload.cpu import gpu_worker

    tensor = torch.empty((1 + max(ids), 1), dtype=torch.int8)
    layers = [SimpleNamespace(tensor_idx=0, page_size_bytes=1)] * LAYERS
    handler = SimpleNamespace(
        layer_refs_per_group=[layers],
        src_blocks_per_chunk=1,
        dst_blocks_per_chunk=1,
        src_tensors=[tensor],
        dst_tensors=[tensor],
    )
    filled = [np.zeros(LAYERS * len(ids), dtype=np.int64) for _ in range(3)]
    blocks = np.array(ids)
    count, _ = gpu_worker.SingleDirectionOffloadingHandler._fill_direct_ops(
        handler, 0, blocks, blocks, len(ids), 0, 0, *filled, 0
    )
    return count


def count_simple_cpu(_: Worker, ids: Ids) -> int:
    from vllm.v1.simple_kv_offload import cuda_mem_ops

    counts = []

    def copy(_dst: int, _src: int, _sizes: int, count: int, *_: Any) -> int:
        counts.append(count)
        return 0

    layers = np.array(bases(), dtype=np.uint64)
    sizes = np.full(LAYERS, BLOCK_BYTES, dtype=np.uint64)
    attributes = cuda_mem_ops._CUmemcpyAttributes(), cuda_mem_ops.ctypes.c_size_t(0)
    params = cuda_mem_ops.BatchMemcpyParams(
        layers,
        layers,
        sizes,
        LAYERS,
        *attributes,
        1,
        cuda_mem_ops.ctypes.c_size_t(0),
        0,
    )
    cuda_mem_ops._batch_memcpy = copy, 1
    cuda_mem_ops.copy_blocks(ids, ids, params)
    return sum(counts)


COUNTS: dict[str, Callable[[Worker, Ids], int]] = {
    "MooncakeConnector": count_mooncake,
    "MooncakeConnector, sorted": count_mooncake_sorted,
    "NixlConnector": count_nixl,
    "NixlConnector, sorted": count_nixl_sorted,
    "MoRIIOConnector": count_moriio,
    "MooncakeStoreConnector": count_store,
    "OffloadingConnector": count_offloading,
    "SimpleCPUOffloadConnector": count_simple_cpu,
    "direct read": count_direct_read,
}


# Transfers, from some memory of this process to other memory of it.


class Memory:
    """Blocks of all layers, filled, and as many zeros to be filled from them."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        size = blocks * block_bytes
        fill = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self.source = [np.roll(fill, layer) for layer in range(LAYERS)]
        self.target = [np.zeros_like(fill) for _ in range(LAYERS)]
        self.blocks, self.block_bytes = blocks, block_bytes

    def addresses(self, side: list[np.ndarray]) -> Ids:
        """Return where the layers of one side begin."""
        return [layer.ctypes.data for layer in side]

    def arrived(self) -> bool:
        """Compare all blocks but the null block."""
        first = self.block_bytes
        pairs = zip(self.source, self.target, strict=True)
        return all(np.array_equal(a[first:], b[first:]) for a, b in pairs)

    def clear(self) -> None:
        """Fill the target with zeros."""
        for layer in self.target:
            layer[:] = 0


class Transport(Protocol):
    """Two agents of this process, which know each other's memory."""

    memory: Memory

    def transfer(self, ids: Ids, is_sorted: bool) -> tuple[int, bool]:
        """Send blocks: descriptors, and whether the transport accepted them."""


class MooncakeTransport:
    """Mooncake over TCP: one write of all descriptors."""

    def __init__(self, worker: Worker, memory: Memory) -> None:
        from mooncake.engine import TransferEngine

        self.memory, self.modules = memory, worker.modules
        self.engines = TransferEngine(), TransferEngine()
        for engine, side in zip(
            self.engines, (memory.source, memory.target), strict=True
        ):
            assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
            sizes = [layer.nbytes for layer in side]
            assert not engine.batch_register_memory(memory.addresses(side), sizes)

    def transfer(self, ids: Ids, is_sorted: bool) -> tuple[int, bool]:
        memory, (sender, receiver) = self.memory, self.engines
        source, target = (
            memory.addresses(memory.source),
            memory.addresses(memory.target),
        )
        module = self.modules[is_sorted]
        made = mooncake(module, ids, ids, source, target, memory.block_bytes)
        session = f"{HOST}:{receiver.get_rpc_port()}"
        return len(made[0]), sender.batch_transfer_sync_write(session, *made) == 0


class NixlTransport:
    """NIXL over UCX: a read of prepared descriptors, as vLLM's worker begins it.

    No patch sorts its pairs: `is_sorted` does it here, before the worker's function.
    """

    def __init__(self, _worker: Worker, memory: Memory) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.memory = memory
        config = nixl_agent_config(backends=["UCX"], capture_telemetry=True)
        self.reader, peer = nixl_agent("reader", config), nixl_agent("peer", config)
        ours = self._describe(self.reader, memory.target)
        theirs = self._describe(peer, memory.source)
        name = self.reader.add_remote_agent(peer.get_agent_metadata())
        self.ours = self.reader.prep_xfer_dlist("NIXL_INIT_AGENT", ours)
        self.theirs = self.reader.prep_xfer_dlist(name, theirs)
        self.peer = peer

    def _describe(self, agent: Any, side: list[np.ndarray]) -> Any:
        memory = self.memory
        regions = [(layer.ctypes.data, layer.nbytes, 0, "") for layer in side]
        agent.register_memory(agent.get_reg_descs(regions, "DRAM"))
        places = memory.block_bytes * np.arange(memory.blocks)
        bytes_each = np.full(memory.blocks, memory.block_bytes)
        devices = np.zeros(memory.blocks, dtype=int)
        blocks = [
            np.stack([base + places, bytes_each, devices], axis=1)
            for base in memory.addresses(side)
        ]
        return agent.get_xfer_descs(np.concatenate(blocks).astype(np.uint64), "DRAM")

    def transfer(self, ids: Ids, is_sorted: bool) -> tuple[int, bool]:
        reader, blocks = self.reader, self.memory.blocks
        theirs, ours = sort_pairs(ids, ids) if is_sorted else (ids, ids)
        local, remote = nixl_ids(ours, blocks), nixl_ids(theirs, blocks)
        handle = reader.make_prepped_xfer("READ", self.ours, local, self.theirs, remote)
        state = reader.transfer(handle)
        while state == "PROC":
            state = reader.check_xfer_state(handle)
        # NIXL itself merges neighbours that ascend.
        descriptors = reader.get_xfer_telemetry(handle).descCount
        reader.release_xfer_handle(handle)
        return descriptors, state == "DONE"


TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "mooncake": MooncakeTransport,
    "nixl": NixlTransport,
}


class Worker:
    """Mooncake's module before and after the patch, and a transport."""

    def __init__(self) -> None:
        self.chance = Random(0)
        self.size: tuple[str, int, int] | None = None
        self.transport: Transport | None = None

    @cached_property
    def modules(self) -> tuple[ModuleType, ModuleType]:
        return before_and_after(MOONCAKE)

    def prepared(self, kind: str, blocks: int, block_bytes: int) -> Transport:
        """Return the transport of a size; the one before it is given up."""
        if self.size != (kind, blocks, block_bytes):
            self.transport = None
            memory = Memory(1 + blocks, block_bytes)
            self.transport = TRANSPORTS[kind](self, memory)
            self.size = kind, blocks, block_bytes
        assert self.transport is not None
        return self.transport


def time_case(worker: Worker, tokens: int, order: str) -> list[tuple]:
    """Group and describe one transfer with both versions; return Timed's fields."""
    ours, theirs = ORDERS[order](tokens // BLOCK_TOKENS)
    found: dict[int, tuple[int, float, float]] = {}
    for number in worker.chance.sample(range(2), 2):
        module = worker.modules[number]
        began_ns = time.perf_counter_ns()
        module.group_concurrent_contiguous(ours, theirs)
        grouped_ns = time.perf_counter_ns()
        made = mooncake(module, ours, theirs, bases(), bases(), BLOCK_BYTES)
        ended_ns = time.perf_counter_ns()
        group_us, describe_us = grouped_ns - began_ns, ended_ns - grouped_ns
        found[number] = len(made[0]), group_us / 1e3, describe_us / 1e3
    return list(zip(found[0], found[1], strict=True))


def count(worker: Worker, tokens: int) -> dict[str, dict[str, int]]:
    """Count each connector's descriptors in two rounds of a pool."""
    rounds = rounds_of_a_pool(tokens // BLOCK_TOKENS)
    return {
        name: {order: of(worker, ids) for order, ids in rounds.items()}
        for name, of in COUNTS.items()
    }


def send(
    worker: Worker,
    kind: str,
    tokens: int,
    block_bytes: int,
    order: str,
    is_sorted: bool,
) -> tuple[int, float, bool]:
    """Transfer a request's blocks: descriptors, ms, and whether all bytes arrived.

    The time begins with the block ids and includes the making of descriptors.
    """
    blocks = tokens // BLOCK_TOKENS
    ids = ORDERS[order](blocks)[0]
    transport = worker.prepared(kind, blocks, block_bytes)
    transport.memory.clear()
    began_ns = time.perf_counter_ns()
    descriptors, accepted = transport.transfer(ids, is_sorted)
    took_ms = (time.perf_counter_ns() - began_ns) / 1e6
    assert transport.memory.arrived() or not accepted
    return descriptors, took_ms, accepted


if __name__ == "__main__":
    serve(Worker(), sys.argv[-1], time_case, count, send)
