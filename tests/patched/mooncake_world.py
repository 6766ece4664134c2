# SPDX-License-Identifier: Apache-2.0
"""One engine that is Mooncake's prefiller and decoder at once, made anew in no time.

As kv_both a Mooncake engine can pull from itself over loopback: the scheduler, both
halves of the connector, ZMQ and the transfer engine are the real ones, and the test
takes every step. A World replaces scheduler and connectors of the engine by new ones of
a given version of their code. It needs no version number: what differs between releases
is read off the module.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from kvtax.engine.connector import load_connector
from kvtax.engine.null_engine import NullEngine, cached_tokens


def reports_failed_pulls(module: ModuleType) -> bool:
    """Whether a decoder tells the scheduler of requests that an answer calls failed."""
    # Upstream's form, and our patch's.
    names = ("_handle_failed_recv", "fail_pulls")
    return any(hasattr(module.MooncakeConnectorWorker, name) for name in names)


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

        def watched_schedule(*arguments):
            output = schedule(*arguments)
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
        known = self.scheduler.requests
        return all(
            request in known
            and known[request].status == RequestStatus.WAITING_FOR_REMOTE_KVS
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
