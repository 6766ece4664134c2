# SPDX-License-Identifier: Apache-2.0
"""Mooncake connectors of any release, without a second machine.

Differences between releases are read off the module: classes, signatures and fields. No
version is needed.

A Party is a worker connector whose loops get events as the connector gives them.
Worker, event loops, threads and coroutines are the real ones of a given version of the
module; only the transfer of bytes is replaced, by one that ends on command.

A World is one engine that is prefiller and decoder at once, made anew in milliseconds.
As kv_both a Mooncake engine can pull from itself over loopback: the scheduler, both
halves of the connector, ZMQ and the transfer engine are the real ones, and the test
takes every step. A World replaces scheduler and connectors of the engine by new ones of
a given version of their code.
"""

from __future__ import annotations

import asyncio
import copy
import os
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from kvtax.engine.connector import load_connector
from kvtax.engine.null_engine import NullEngine, cached_tokens

# Fields of a decoder's message that have another name on the worker.
ATTRIBUTES = {
    "remote_hostname": "hostname",
    "remote_port": "rpc_port",
    "remote_tp_size": "tp_size",
    "remote_tp_rank": "tp_rank",
    "remote_pp_size": "pp_size",
    "block_lens": "block_len_per_layer",
    "kv_block_lens": "kv_block_len_per_layer",
    "registered_shared_group_ids": "region_shared_groups",
    "registered_row_offsets": "region_row_offsets",
}
# A worker's only region of memory, as register_kv_caches() would note it.
REGION = {
    "block_len": 16,
    "kv_caches_base_addr": [0],
    "block_len_per_layer": [16],
    "kv_block_len_per_layer": [16],
    "registered_layer_names": ["layers.0.attention"],
    "registered_layer_indices": [0],
    "registered_group_indices": [0],
    "region_shared_groups": [(0,)],
    "region_row_offsets": [-1],
}


def new_worker(module: ModuleType, vllm_config: Any, kv_cache_config: Any) -> Any:
    known = signature(module.MooncakeConnectorWorker).parameters
    more = [kv_cache_config] if "kv_cache_config" in known else []
    return module.MooncakeConnectorWorker(vllm_config, "engine", *more)


def give_a_region(worker: Any) -> None:
    for name, value in REGION.items():
        setattr(worker, name, value)


def block_ids(module: ModuleType, *ids: int) -> list:
    """Block ids as the connector has them: later releases have a list per group."""
    kind = module.SendBlockMeta.__annotations__["local_block_ids"]
    return [list(ids)] if str(kind) == "list[list[int]]" else list(ids)


def pull_of(module: ModuleType, worker: Any, req_blocks: dict, **other: Any) -> Any:
    """What a decoder with the memory of this worker asks of a prefiller."""
    known = module.MooncakeXferMetadata.__struct_fields__
    fields = {name: getattr(worker, ATTRIBUTES.get(name, name), None) for name in known}
    fields |= {"req_blocks": req_blocks} | other
    return module.MooncakeXferMetadata(**fields)


def report_method(module: ModuleType) -> str:
    """The worker's method that an engine step asks what has ended."""
    later = "get_transfer_results"
    found = hasattr(module.MooncakeConnectorWorker, later)
    return later if found else "get_finished"


def reports_failed_pulls(module: ModuleType) -> bool:
    """Whether a decoder tells the scheduler of requests that an answer calls failed."""
    # Upstream's form, and our patch's.
    names = ("_handle_failed_recv", "fail_pulls")
    return any(hasattr(module.MooncakeConnectorWorker, name) for name in names)


WAIT_S = 60.0
SENDER_THREADS = 40

Report = tuple[set[str] | None, set[str] | None, set[str] | None]


class Socket:
    """Where a send's answers go; `answered` is called with each, on the loop."""

    def __init__(self, module: ModuleType, answered: Callable) -> None:
        self._decoder = msgspec.msgpack.Decoder(module.MooncakeXferResponse)
        self._answered = answered

    async def send_multipart(self, parts: tuple[bytes, bytes]) -> None:
        self._answered(self._decoder.decode(parts[1]))


class Party:
    """One worker of `module` in one role.

    A request is known by one name, as request on either side and as transfer. `asks`
    counts what an engine step's report() has asked of the event loops.
    """

    def __init__(
        self,
        module: ModuleType,
        vllm_config: Any,
        kv_cache_config: Any,
        role: str,
    ) -> None:
        module.should_launch_bootstrap_server = lambda config: False
        config = copy.copy(vllm_config)
        config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        config.kv_transfer_config.kv_role = role
        config.kv_transfer_config.kv_connector_extra_config = {
            "mooncake_protocol": "tcp",
            "num_workers": SENDER_THREADS,
        }
        self.sends, self.receives = role != "kv_consumer", role != "kv_producer"
        self.asks = 0
        self._asking = False
        self.module = module
        self._report = report_method(module)
        self.worker = worker = new_worker(module, config, kv_cache_config)
        give_a_region(worker)
        worker._send_blocks = self._transfer
        self._transfers: dict[str, queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self._entered: dict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(0)
        )
        self.loops = [worker.sender_loop] if self.sends else []
        self.loops += [worker.receiver_loop] if self.receives else []
        for loop in self.loops:
            self._count_asks(loop)

    def _count_asks(self, loop: asyncio.AbstractEventLoop) -> None:
        call, stepping = loop.call_soon_threadsafe, threading.get_ident()

        def counted(*arguments, **options):
            self.asks += self._asking and threading.get_ident() == stepping
            return call(*arguments, **options)

        loop.call_soon_threadsafe = counted

    # What an engine step does.

    def step(self, registered=(), ready=(), not_processed=()) -> None:
        """The step's metadata, as the scheduler connector sends it."""
        metadata = self.module.MooncakeConnectorMetadata()
        metadata.reqs_to_send = {name: (name, []) for name in registered}
        blocks = block_ids(self.module, 1)
        metadata.reqs_to_send |= {name: (name, blocks) for name in ready}
        metadata.reqs_not_processed = set(not_processed)
        self.worker.start_load_kv(metadata)

    def report(self) -> Report:
        """Ids finished sending, finished receiving, and failed receiving.

        As the method puts it, so None where it says None.
        """
        self._asking = True
        found = getattr(self.worker, self._report)()
        self._asking = False
        if self._report == "get_finished":
            return (*found, None)
        return found.finished_sending, found.finished_recving, found.failed_recving

    # What comes from the network.

    def pull(self, name: str, answered: Callable = lambda response: None) -> Future:
        """A decoder asks for a request's blocks."""
        wanted = {name: (name, block_ids(self.module, 2))}
        metadata = pull_of(self.module, self.worker, wanted, remote_hostname=name)
        sending = self.worker.send_kv_to_decode(
            b"", Socket(self.module, answered), metadata
        )
        return asyncio.run_coroutine_threadsafe(sending, self.worker.sender_loop)

    def receive(self, ok: list[str], failed: list[str] = ()) -> Future:
        """Pulls of this side end."""
        # As later releases have them; 0.18.1 only asks whether there are any.
        metas, blocks = {}, [[1]]
        for name in (*ok, *failed):
            metas[name] = self.module.PullReqMeta(name, name, blocks, "engine", "")
            metas[name].pull_tasks_count, metas[name].failed = 1, False
        status = self.module.MooncakeXferResponseStatus.FINISH
        response = self.module.MooncakeXferResponse(
            status, ok_reqs=list(ok), err_reqs=list(failed)
        )

        async def end() -> float:
            self.worker.process_pulling_result(response, metas)
            return time.perf_counter()

        return asyncio.run_coroutine_threadsafe(end(), self.worker.receiver_loop)

    # The transfer of bytes, on the sender's threads.

    def _transfer(self, session: str, *buffers: list[int]) -> int:
        name = session.partition(":")[0]
        self._entered[name].release()
        return self._transfers[name].get()

    def wait_sending(self, name: str) -> None:
        assert self._entered[name].acquire(timeout=WAIT_S), f"{name} is not sent"

    def end_transfer(self, name: str, status: int) -> None:
        self._transfers[name].put(status)

    def let_loops_idle(self) -> None:
        """All that was asked of the loops is done as far as it can be."""

        async def rounds() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        for loop in self.loops:
            asyncio.run_coroutine_threadsafe(rounds(), loop).result(WAIT_S)


def set_timeout(timeout_s: float) -> None:
    """VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, which vLLM itself reads but once."""
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = timeout_s


NUM_BLOCKS = 400
# What has not happened by then never will; a busy machine is given time.
PATIENCE_S = 90.0
# Nothing but the wake-up that a test looks for can end a wait this long.
LONG_TIMEOUT_S = 300


@dataclass
class Code:
    """The versions of vLLM's modules that a World runs."""

    connector: ModuleType
    scheduler: ModuleType


@dataclass
class Fate:
    """What became of a request, from the engine's outputs and the scheduler's steps."""

    output_tokens: int
    new_tokens: int = 0
    computed_tokens: int = 0
    pulled_tokens: int = 0
    finish_reason: str | None = None

    @property
    def complete(self) -> bool:
        return self.finish_reason == "length" and self.new_tokens == self.output_tokens


class MooncakeEngine(NullEngine):
    """The engine that Worlds are made of."""

    def __init__(self, model: Path) -> None:
        config = load_connector("mooncake_both").kv_transfer_config
        super().__init__(model, {"kv_buffer_device": "cpu"} | config, NUM_BLOCKS)
        self.first_worker = get_kv_transfer_group().connector_worker


class World:
    """The engine with a new scheduler and connector of `code`.

    `policy` is kv_load_failure_policy, `timeout_s` how long the prefiller keeps blocks
    that nobody pulls, `patience_s` how long the test waits for anything.
    """

    def __init__(
        self,
        engine: MooncakeEngine,
        code: Code,
        policy: str = "recompute",
        timeout_s: float = LONG_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.engine = engine
        self._patience_s = patience_s
        self.fates: dict[str, Fate] = {}
        self._prompts = random.Random(5)
        config = engine.core.vllm_config
        config.kv_transfer_config.kv_load_failure_policy = policy
        envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = timeout_s
        self.scheduler = code.scheduler.Scheduler(
            vllm_config=config,
            kv_cache_config=engine.core.scheduler.kv_cache_config,
            structured_output_manager=engine.core.structured_output_manager,
            block_size=config.cache_config.block_size,
            log_stats=False,
        )
        self._watch(self.scheduler)
        engine.core.scheduler = self.scheduler
        self._new_connectors(code.connector)
        self._free_at_start = self.free_blocks()
        self._traffic: str | None = None

    def _watch(self, scheduler) -> None:
        schedule = scheduler.schedule

        def watched_schedule(*told):
            output = schedule(*told)
            for request, tokens in output.num_scheduled_tokens.items():
                if fate := self.fates.get(request):
                    fate.computed_tokens += tokens
            return output

        scheduler.schedule = watched_schedule

    def _new_connectors(self, module: ModuleType) -> None:
        # The first connector's bootstrap server serves them all, one after the other.
        module.should_launch_bootstrap_server = lambda config: False
        first = self.engine.first_worker
        first.bootstrap_server.workers.clear()
        config = self.engine.core.vllm_config
        config.kv_transfer_config.engine_id = f"engine-{random.getrandbits(64)}"
        port = os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
        self.bootstrap = f"http://127.0.0.1:{port}"
        arguments = self.scheduler.kv_cache_config
        self.scheduler.connector = module.MooncakeConnector(
            config, KVConnectorRole.SCHEDULER, arguments
        )
        connector = module.MooncakeConnector(config, KVConnectorRole.WORKER, arguments)
        connector.register_kv_caches(first.device_kv_caches)
        self.worker = connector.connector_worker
        kv_transfer_state._KV_CONNECTOR_AGENT = connector

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that shares no block with another."""
        return [self._prompts.randrange(1, 1_024) for _ in range(tokens)]

    def add(self, prompt_tokens: int, output_tokens: int, **params) -> str:
        request = self.engine.add(
            self.prompt(prompt_tokens), output_tokens, params or None
        )
        self.fates[request] = Fate(output_tokens)
        return request

    def prefill(self, transfer_id: str, tokens: int = 70, output_tokens: int = 1):
        return self.add(
            tokens, output_tokens, do_remote_decode=True, transfer_id=transfer_id
        )

    def decode(
        self,
        transfer_id: str,
        tokens: int = 70,
        engine_id: str | None = None,
        bootstrap: str | None = None,
    ) -> str:
        return self.add(
            tokens,
            3,
            do_remote_prefill=True,
            transfer_id=transfer_id,
            remote_engine_id=engine_id or self.worker.engine_id,
            remote_bootstrap_addr=bootstrap or self.bootstrap,
        )

    def abort(self, *requests: str) -> None:
        self.engine.core.abort_requests(list(requests))

    def step(self) -> None:
        """One step of the engine, which other traffic keeps busy as it does in life."""
        if self._traffic not in self.scheduler.requests:
            self._traffic = self.engine.add(self.prompt(1), 500)
        outputs, _ = self.engine.core.step()
        for output in outputs[0].outputs if outputs else ():
            if fate := self.fates.get(output.request_id):
                fate.new_tokens += len(output.new_token_ids)
                if cached := cached_tokens(output):
                    fate.pulled_tokens = cached[1]
                if output.finish_reason is not None:
                    fate.finish_reason = str(output.finish_reason)
        time.sleep(0.0005)

    def until(self, holds: Callable[[], bool]) -> bool:
        """Step until it holds; whether it did in time."""
        deadline = time.monotonic() + self._patience_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.step()
        return True

    def waiting_for_remote_kv(self, *requests: str) -> bool:
        found = self.scheduler.requests
        return all(
            request in found
            and found[request].status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in requests
        )

    def known(self, requests: Iterable[str]) -> list[str]:
        """Those of which the scheduler still holds blocks or state."""
        return [request for request in requests if request in self.scheduler.requests]

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def settle(self) -> list[str]:
        """Step until nothing is left; what does not go away, in words."""
        problems = []
        if not self.until(lambda: not self.known(self.fates)):
            left = {
                request: self.scheduler.requests[request].status.name
                for request in self.known(self.fates)
            }
            problems.append(f"still there: {left}")
        self.abort(self._traffic)
        while self.scheduler.has_unfinished_requests() and not problems:
            self.step()
        self.engine.core.step()
        if (missing := self._free_at_start - self.free_blocks()) and not problems:
            problems.append(f"{missing} blocks did not come back")
        return problems
