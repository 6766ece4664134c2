# SPDX-License-Identifier: Apache-2.0
"""A Mooncake worker connector whose loops are given events as the connector does.

Worker, event loops, threads and coroutines are the real ones of a given version of the
module; only the transfer of bytes is replaced, by one that ends when it is told to.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import msgspec
from mooncake_shapes import block_ids, give_a_region, new_worker, pull_of, report_method
from vllm import envs

WAIT_S = 10.0
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
