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
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
from hypothesis import strategies as st

from kvtax import patcher
from tests.patches.test_releases import copy_of
from tests.releases import package_of

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
# Seconds of VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
TIMEOUT_S = 480
# Seconds of a transfer of bytes: several steps, or longer than a timeout.
TRANSFERS_S = (0.01, 3, TIMEOUT_S + 30)
MOST_PHRASES = 25  # of one example
PROTOCOL = (
    "MooncakeXferMetadata",
    "MooncakeXferResponseStatus",
    "MooncakeXferResponse",
    "PullReqMeta",
    "SendBlockMeta",
    "MooncakeConnectorMetadata",
)
METHODS = (
    "get_finished",
    "fetch_finished_recving_reqs",
    "_sender_worker",
    "send_kv_to_decode",
    "resolve_need_send",
    "end_transfer",
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
        wanted = msgspec.msgpack.decode(
            message, type=self._pair.p_types.MooncakeXferMetadata
        )
        self._requests = wanted.req_blocks.keys()
        self._pair.sockets[str(id(self)).encode()] = self._answers
        await self._pair.p.sender_worker_queue.put((str(id(self)).encode(), message))

    async def recv(self) -> bytes:
        try:
            answer = await asyncio.wait_for(self._answers.get(), TIMEOUT_S + 60)
        except TimeoutError:
            raise Again from None
        if self._pair.is_last(answer):
            self._pair.answered |= self._requests
        return answer


class Pair:
    """A prefiller and a decoder; `both` if each is both, by its role.

    Blocks are numbers, 1, 2 and so on. Each request of P is read by `ranks` pulls.
    """

    def __init__(
        self, p_source: Path, d_source: Path, both: bool = False, ranks: int = 1
    ) -> None:
        self.clock = SimulatedClock()
        self.loop = asyncio.SelectorEventLoop(self.clock)
        self.loop.time = lambda: self.clock.now_s
        self.p_types, self.d_types = protocol(p_source), protocol(d_source)
        # Times that a step has waited for an event loop.
        self.waits = 0
        for module in (self.p_types, self.d_types):
            module.asyncio = SimpleNamespace(
                **vars(asyncio) | {"run_coroutine_threadsafe": self._wait_for}
            )
            module.time = SimpleNamespace(perf_counter=self.loop.time)
            module.make_zmq_socket = self._connect
        self.p = self.p_types.MooncakeConnectorWorker()
        self.d = self.d_types.MooncakeConnectorWorker()
        self.sockets: dict[bytes, asyncio.Queue] = {}
        self.answers: list[Any] = []
        # What P has written into D: per block of D, the block of P. Not of blocks that
        # P handed back before the transfer ended: they may hold another request's.
        self.memory: dict[int, int] = {}
        self._ranks = ranks
        self.transfers_fail = False
        self.transfer_s = TRANSFERS_S[0]
        self.transfers_under_way = 0
        # Blocks of each request of P that was ready, and those handed back.
        self.ready_blocks: dict[str, list[int]] = {}
        self.freed: set[int] = set()
        # Times at which requests of P that were ready expire.
        self.expiries_s: set[float] = set()
        # Per request of P: how often its end was reported.
        self.ended_sends: dict[str, int] = defaultdict(int)
        # Per request of D, received or not: how often its end was reported.
        self.ended_pulls: Counter[str] = Counter()
        # Requests of D whose message has got its last answer.
        self.answered: set[str] = set()
        # What the last step has reported, of P and of D.
        self.reports: list[tuple] = []
        self._pulls: list[asyncio.Task] = []
        self._new_blocks = iter(range(1, 1 << 30))
        self._by_group = "list[list[int]]" in str(
            self.p_types.SendBlockMeta.__annotations__["local_block_ids"]
        )
        for worker in (self.p, self.d):
            worker.is_kv_consumer, worker.is_kv_producer = (
                (False, False) if both else (worker is self.d, worker is self.p)
            )
            worker.kv_caches_base_addr = [0]
            worker.reqs_need_send = {}
            worker.finished_sending_reqs, worker.finished_recving_reqs = set(), set()
            worker.next_send_expire_time = float("inf")
            worker.sender_loop = SimpleNamespace(run_in_executor=self._transfer)
            worker.receiver_loop = None
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
        worker.resolve_need_send = lambda send, *_: setattr(
            send, "need_send", self._ranks
        )
        worker._build_transfer_params = self._build_transfer
        worker.xfer_stats = MagicMock()
        worker._encoder = msgspec.msgpack.Encoder()
        worker._xfer_meta_decoder = msgspec.msgpack.Decoder(types.MooncakeXferMetadata)
        worker.sender_worker_queue = asyncio.Queue()
        worker._sender_executor = worker._send_blocks = None
        socket = SimpleNamespace(send_multipart=self._answer)
        # No pull waits for another.
        self._senders = [
            self.loop.create_task(worker._sender_worker(socket))
            for _ in range(MOST_PHRASES)
        ]

    def _prepare_decoder(self, worker: Any, types: ModuleType) -> None:
        worker.hostname, worker.rpc_port, worker.tp_size, worker.tp_rank = "d", 1, 1, 0
        worker.pp_size = 1
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

    def _read(self, answer: bytes) -> Any:
        return msgspec.msgpack.decode(answer, type=self.p_types.MooncakeXferResponse)

    def is_last(self, answer: bytes) -> bool:
        """Whether no more can follow. 0.18.1's does after one of failures alone."""
        response = self._read(answer)
        if response.status == self.p_types.MooncakeXferResponseStatus.CONTINUE:
            return False
        return response.ok_reqs is not None or not response.err_reqs

    async def _answer(self, parts: tuple[bytes, bytes]) -> None:
        self.answers.append(self._read(parts[1]))
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
        params = source, destination, [1] * len(pairs), failed
        message = "fewer blocks" if failed else None
        return (*params, message) if self._by_group else params

    async def _transfer(self, executor, send, session, source, destination, lengths):
        fails = self.transfers_fail
        self.transfers_under_way += 1
        await asyncio.sleep(self.transfer_s)
        self.transfers_under_way -= 1
        if fails:
            return -1
        self.memory.update(
            (theirs, ours)
            for theirs, ours in zip(destination, source, strict=True)
            if ours not in self.freed
        )
        return 0

    # What the schedulers ask for.

    def blocks(self, count: int) -> list:
        """New blocks, in the form of the release."""
        ids = [next(self._new_blocks) for _ in range(count)]
        return [ids] if self._by_group else ids

    def step(
        self, to_send: dict[str, tuple[str, list]], aborted: dict[str, None]
    ) -> None:
        """A step of P: its metadata, and the report of what has ended."""
        metadata = self.p_types.MooncakeConnectorMetadata()
        metadata.reqs_to_send, metadata.reqs_not_processed = to_send, aborted
        self.ready_blocks |= {p: flat(blocks) for p, (_, blocks) in to_send.items()}
        self.expiries_s.add(self.clock.now_s + TIMEOUT_S)

        async def record() -> None:
            # Upstream's errors are seen by nobody, either.
            with contextlib.suppress(KeyError, AssertionError):
                await self.p.record_send_reqs(metadata)
            # Whoever it wakes has run before the step asks.
            await asyncio.sleep(1e-6)

        self.loop.run_until_complete(record())
        self.reports = [self.p.get_finished(), self.d.get_finished()]
        for request in self.reports[0][0] or ():
            self.ended_sends[request] += 1
            self.freed.update(self.ready_blocks.get(request, ()))
        self.ended_pulls.update(self.reports[1][1] or ())

    def _wait_for(self, coroutine, loop) -> SimpleNamespace:
        self.waits += 1
        result = self.loop.run_until_complete(coroutine)
        return SimpleNamespace(result=lambda: result)

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


IDS = st.sampled_from(["t", "u"])
COUNTS = st.integers(1, 3)
NUMBERS = st.integers(0, 3)
CHANGES = st.one_of(
    st.tuples(st.just("schedule"), IDS),
    st.tuples(st.just("finish"), NUMBERS, COUNTS),
    st.tuples(st.just("abort"), NUMBERS),
    st.tuples(st.just("abort_unscheduled"), IDS),
)
EVENTS = st.one_of(
    CHANGES,
    st.tuples(st.just("step")),
    # A pull of no blocks is that of an aborted request.
    st.tuples(st.just("pull"), st.lists(st.tuples(IDS, st.integers(0, 3)), min_size=1)),
    st.tuples(st.just("transfers_fail"), st.booleans()),
    st.tuples(st.just("transfers_take"), st.sampled_from(TRANSFERS_S)),
    st.tuples(
        st.just("wait"), st.sampled_from([0.001, 0.02, 1, TIMEOUT_S, TIMEOUT_S + 1])
    ),
)
# Most changes reach P's worker alone, as most steps change one request.
PHRASES = st.one_of(
    CHANGES.map(lambda change: [change, ("step",)]), EVENTS.map(lambda event: [event])
)
TRAFFIC = st.lists(PHRASES, min_size=8, max_size=MOST_PHRASES).map(
    lambda phrases: [*chain.from_iterable(phrases), ("end",)]
)


class Traffic:
    """What two schedulers ask of their workers; few transfer ids, used often."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        # Per request of D, the blocks it pulls, and of whom.
        self.pulls: dict[str, list[int]] = {}
        self._ids: dict[str, str] = {}
        # Requests of P whose blocks are kept until P's worker reports an end.
        self.kept: set[str] = set()
        self._scheduled: dict[str, str] = {}
        self._requests = 0
        self._clear()

    def _clear(self) -> None:
        self._to_send: dict[str, tuple[str, list]] = {}
        # In this order.
        self._aborted: dict[str, None] = {}

    def run(self, events: list[tuple]) -> Traffic:
        for name, *arguments in events:
            getattr(self, name)(*arguments)
            self.wait(1e-6)
        return self

    def schedule(self, transfer_id: str) -> None:
        self._requests += 1
        request = f"p{self._requests}"
        self._scheduled[request] = transfer_id
        self._to_send[request] = transfer_id, []

    def _take(self, number: int) -> tuple[str, str] | None:
        """A request that an earlier step has scheduled."""
        requests = [r for r in self._scheduled if r not in self._to_send]
        if not requests:
            return None
        request = requests[number % len(requests)]
        return request, self._scheduled.pop(request)

    def finish(self, number: int, count: int) -> None:
        if taken := self._take(number):
            self._to_send[taken[0]] = taken[1], self.pair.blocks(count)
            self.kept.add(taken[0])

    def abort(self, number: int) -> None:
        if taken := self._take(number):
            self._aborted[taken[1]] = None

    def abort_unscheduled(self, transfer_id: str) -> None:
        self._aborted[transfer_id] = None

    def step(self) -> None:
        to_send, aborted = self._to_send, self._aborted
        self._clear()
        self.pair.step(to_send, aborted)

    def pull(self, wanted: list[tuple[str, int]]) -> None:
        first = len(self.pulls)
        requests = {
            f"d{first + n}": (transfer_id, self.pair.blocks(count))
            for n, (transfer_id, count) in enumerate(wanted)
        }
        self.pulls |= {
            request: flat(blocks) for request, (_, blocks) in requests.items()
        }
        self._ids |= {request: id for request, (id, _) in requests.items()}
        self.pair.pull(requests)

    def transfers_fail(self, fail: bool) -> None:
        self.pair.transfers_fail = fail

    def transfers_take(self, duration_s: float) -> None:
        self.pair.transfer_s = duration_s

    def wait(self, duration_s: float) -> None:
        self.pair.wait(duration_s)

    def end(self) -> None:
        """Abort what runs, and wait until all that can end has ended."""
        while self._scheduled:
            self.step()
            self.abort(0)
        for _ in range(5):
            self.step()
            self.wait(TIMEOUT_S + 61)
        self.step()

    def pulls_of_aborted(self) -> set[str]:
        """Pulls of requests that P's worker is to learn are aborted."""
        return {r for r in self.wanted() if self._ids[r] in self._aborted}

    # What D's scheduler makes of it. A pull of no blocks has no request.

    def failed(self) -> set[str]:
        invalid = self.pair.invalid_blocks()
        return {r for r, blocks in self.pulls.items() if not invalid.isdisjoint(blocks)}

    def wanted(self) -> set[str]:
        return {request for request, blocks in self.pulls.items() if blocks}

    def finished(self) -> set[str]:
        """Requests whose end D's worker reports, received or not."""
        return self.pair.ended_pulls.keys() | self.pair.d.finished_recving_reqs

    def taken_as_received(self) -> set[str]:
        return self.finished() & self.wanted() - self.failed()

    def ended(self) -> set[str]:
        return self.taken_as_received() | self.failed()

    def received(self) -> set[str]:
        return {
            r
            for r in self.taken_as_received()
            if self.pair.memory.keys() >= set(self.pulls[r])
        }


SIDES = ("upstream", "patched")
Sources = dict[str, Path]


def make_sources(release: str, patch: patcher.Patch, place: Path) -> Sources:
    """The connector of a release, as it is and patched."""
    sources = {}
    for side in SIDES:
        tree = copy_of(patch, package_of(release), place / side)
        if side == "patched":
            patcher.apply(tree, [patch])
        sources[side] = tree.root / CONNECTOR
    return sources
