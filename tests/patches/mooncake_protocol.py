# SPDX-License-Identifier: Apache-2.0
"""Mooncake's two workers of any release on a simulated clock, without vLLM.

A Pair is a prefiller and a decoder, each from its own source, so that a patched one can
meet an unpatched one. Their answers, waits and bookkeeping are the release's own code;
memory, network and layouts are stand-ins.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import contextlib
import functools
import queue
import selectors
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
# Seconds of VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, and of one transfer of bytes.
TIMEOUT_S, TRANSFER_S = 480, 0.01
PROTOCOL = (
    "MooncakeXferMetadata",
    "MooncakeXferResponseStatus",
    "MooncakeXferResponse",
    "PullReqMeta",
    "SendBlockMeta",
    "MooncakeConnectorMetadata",
)
METHODS = (
    "_sender_worker",
    "send_kv_to_decode",
    "resolve_need_send",
    "fetch_finished_sending_reqs",
    "record_send_reqs",
    "receive_kv_from_single_worker",
    "process_pulling_result",
    "_handle_failed_recv",
    "_complete_pull_task",
    "fail_pulls",
)


# What workers of some release know of their memory.
REGIONS = (
    "block_len_per_layer",
    "kv_block_len_per_layer",
    "registered_layer_names",
    "registered_layer_indices",
    "registered_group_indices",
    "region_shared_groups",
    "region_row_offsets",
)


class SimulatedClock(selectors.DefaultSelector):
    """Selector of a loop that waits no real time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        assert timeout is not None, "nothing will ever happen"
        self.now_s += timeout
        return []


class Again(Exception):
    """No answer in time."""


@functools.cache
def protocol(source: Path) -> ModuleType:
    """A module with what a connector's source file says of the protocol."""
    tree = ast.parse(source.read_bytes())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    worker = classes["MooncakeConnectorWorker"]
    worker.body = [n for n in worker.body if getattr(n, "name", None) in METHODS]
    module = ModuleType(f"mooncake_protocol_{hash(source)}")
    # Dataclasses look annotations up there.
    sys.modules[module.__name__] = module
    vars(module).update(
        {
            "Any": Any,
            "EngineId": str,
            "IntEnum": IntEnum,
            "KVConnectorMetadata": object,
            "ReqId": str,
            "TransferId": str,
            "asyncio": asyncio,
            "dataclass": dataclass,
            "defaultdict": defaultdict,
            "envs": SimpleNamespace(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=TIMEOUT_S),
            "logger": MagicMock(),
            "msgspec": msgspec,
            "queue": queue,
            "zmq": MagicMock(ContextTerminated=SystemExit),
            # Layouts, which always fit.
            "_align_transfer_regions": lambda p, d, **_: (p, d, None),
            "_pp_mismatch_hides_packed_layers": lambda *_, **__: False,
            "_validate_asymmetric_region_lengths": lambda *_, **__: None,
        }
    )
    body = [classes[name] for name in (*PROTOCOL, worker.name)]
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), source, "exec", flags), vars(module))
    return module


class Socket:
    """A decoder's connection to the prefiller, while one pull lasts."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.setsockopt = MagicMock()

    async def send(self, message: bytes) -> None:
        self._pair.sockets[str(id(self)).encode()] = self._answers
        await self._pair.p.sender_worker_queue.put((str(id(self)).encode(), message))

    async def recv(self) -> bytes:
        try:
            return await asyncio.wait_for(self._answers.get(), TIMEOUT_S + 60)
        except TimeoutError:
            raise Again from None


class Pair:
    """A prefiller and a decoder. Blocks of P are numbers, 1, 2 and so on."""

    def __init__(self, p_source: Path, d_source: Path) -> None:
        self.clock = SimulatedClock()
        self.loop = asyncio.SelectorEventLoop(self.clock)
        self.loop.time = lambda: self.clock.now_s
        self.p_types, self.d_types = protocol(p_source), protocol(d_source)
        for module in (self.p_types, self.d_types):
            module.time = SimpleNamespace(perf_counter=self.loop.time)
            module.make_zmq_socket = self._connect
        self.p = self.p_types.MooncakeConnectorWorker()
        self.d = self.d_types.MooncakeConnectorWorker()
        self.sockets: dict[bytes, asyncio.Queue] = {}
        self.answers: list[Any] = []
        # What P has written into D: per block of D, the block of P.
        self.memory: dict[int, int] = {}
        self.transfers_fail = False
        # Per request of P: how often its end was reported.
        self.ended_sends: dict[str, int] = defaultdict(int)
        self._pulls: list[asyncio.Task] = []
        self._new_blocks = iter(range(1, 1 << 30))
        self._by_group = "list[list[int]]" in str(
            self.p_types.SendBlockMeta.__annotations__["local_block_ids"]
        )
        for worker in (self.p, self.d):
            worker.kv_caches_base_addr = [0]
            for regions in REGIONS:
                setattr(worker, regions, [])
        self._prepare_prefiller(self.p, self.p_types)
        self._prepare_decoder(self.d, self.d_types)

    def _prepare_prefiller(self, worker: Any, types: ModuleType) -> None:
        worker.tp_rank, worker.tp_size, worker.pp_size = 0, 1, 1
        topology = MagicMock()
        topology.get_target_remote_ranks.return_value = [0]
        topology.handshake_target_ranks.return_value = [0]
        worker.kv_topo = worker.transfer_topo = topology
        worker.opaque_packed_storages, worker.use_mla = [], True
        worker._prepare_transfer_regions = lambda meta: ([], [], None)
        worker._get_transfer_regions = lambda *_: []
        worker._validate_head_resharding_layout = lambda *_: None
        worker._producer_cache_is_replicated = lambda: False
        worker.resolve_need_send = lambda send, *_: setattr(send, "need_send", 1)
        worker._build_transfer_params = self._build_transfer
        worker.xfer_stats = MagicMock()
        worker.reqs_need_send, worker.finished_sending_reqs = {}, set()
        worker.next_send_expire_time = float("inf")
        worker._encoder = msgspec.msgpack.Encoder()
        worker._xfer_meta_decoder = msgspec.msgpack.Decoder(types.MooncakeXferMetadata)
        worker.sender_worker_queue = asyncio.Queue()
        worker.sender_loop = SimpleNamespace(run_in_executor=self._transfer)
        worker._sender_executor = worker._send_blocks = None
        socket = SimpleNamespace(send_multipart=self._answer)
        self._senders = [
            self.loop.create_task(worker._sender_worker(socket)) for _ in range(20)
        ]

    def _prepare_decoder(self, worker: Any, types: ModuleType) -> None:
        worker.hostname, worker.rpc_port, worker.tp_size, worker.tp_rank = "d", 1, 1, 0
        worker.pp_size = 1
        worker.finished_recving_reqs = set()
        worker.invalid_block_ids, worker._invalid_block_ids = [], queue.Queue()
        worker._is_hma_required, worker._kv_layout_id = False, 0
        worker._acked_layout_peers = set()
        worker.async_zmq_ctx, worker.xfer_stats = None, MagicMock()
        worker._encoder = msgspec.msgpack.Encoder()
        worker._xfer_resp_decoder = msgspec.msgpack.Decoder(types.MooncakeXferResponse)
        worker._build_pull_metadata = lambda pulls, include_layout: (
            types.MooncakeXferMetadata(
                **{"remote_hostname": "d", "remote_port": 1, "remote_tp_size": 1},
                remote_tp_rank=0,
                req_blocks={
                    req_id: (pull.transfer_id, pull.local_block_ids)
                    for req_id, pull in pulls.items()
                },
                **{"kv_caches_base_addr": [0], "block_lens": [], "kv_block_lens": []},
            )
        )

    # The network and the memory.

    @contextlib.contextmanager
    def _connect(self, *_: Any, **__: Any):
        yield Socket(self)

    async def _answer(self, parts: tuple[bytes, bytes]) -> None:
        response = msgspec.msgpack.decode(
            parts[1], type=self.p_types.MooncakeXferResponse
        )
        self.answers.append(response)
        self.sockets[parts[0]].put_nowait(parts[1])

    async def _build_transfer(self, ready: list, meta: Any, *_: Any) -> tuple:
        pairs, failed = [], []
        for req_id, send in ready:
            remote = flat(meta.req_blocks[req_id][1])
            local = flat(send.local_block_ids)
            if len(local) < len(remote):
                failed.append(req_id)
            elif remote:
                pairs += zip(local[-len(remote) :], remote, strict=True)
        source, destination = [p for p, _ in pairs], [d for _, d in pairs]
        found = source, destination, [1] * len(pairs), failed
        message = "fewer blocks" if failed else None
        return (*found, message) if self._by_group else found

    async def _transfer(self, executor, send, session, source, destination, lengths):
        fails = self.transfers_fail
        await asyncio.sleep(TRANSFER_S)
        if fails:
            return -1
        self.memory.update(zip(destination, source, strict=True))
        return 0

    # What the schedulers ask for.

    def blocks(self, count: int) -> list:
        """New blocks, in the form of the release."""
        ids = [next(self._new_blocks) for _ in range(count)]
        return [ids] if self._by_group else ids

    def step(self, to_send: dict[str, tuple[str, list]], aborted: set[str]) -> None:
        """A step of P: its metadata, and the report of what has ended."""
        metadata = self.p_types.MooncakeConnectorMetadata()
        metadata.reqs_to_send, metadata.reqs_not_processed = to_send, aborted

        async def report() -> None:
            # Upstream's errors are seen by nobody, either.
            with contextlib.suppress(KeyError, AssertionError):
                await self.p.record_send_reqs(metadata)
            for request in await self.p.fetch_finished_sending_reqs():
                self.ended_sends[request] += 1

        self.loop.run_until_complete(report())

    def pull(self, requests: dict[str, tuple[str, list]]) -> None:
        """Begin a pull of several requests in one message."""
        pulls = {
            req_id: self.d_types.PullReqMeta(
                d_req_id=req_id,
                transfer_id=transfer_id,
                local_block_ids=blocks,
                remote_engine_id="",
                remote_bootstrap_addr="",
                pull_tasks_count=1,
            )
            for req_id, (transfer_id, blocks) in requests.items()
        }
        task = self.d.receive_kv_from_single_worker("", pulls)
        self._pulls.append(self.loop.create_task(task))

    def wait(self, duration_s: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(duration_s))

    def invalid_blocks(self) -> set[int]:
        """Blocks of which D has said that they were not received."""
        worker = self.d
        return {
            block
            for failed in (*worker.invalid_block_ids, *worker._invalid_block_ids.queue)
            for block in flat(failed)
        }

    def close(self) -> None:
        for task in (*self._senders, *self._pulls):
            task.cancel()
        self.loop.run_until_complete(
            asyncio.gather(*self._senders, *self._pulls, return_exceptions=True)
        )
        self.loop.close()


def flat(blocks: Iterable) -> list[int]:
    """Block ids of all groups."""
    return [b for g in blocks for b in (g if isinstance(g, list) else [g])]
