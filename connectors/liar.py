# SPDX-License-Identifier: Apache-2.0
"""A KV connector whose cost per step is known: a measurement must tell what it is.

It does nothing but burn time in one of its methods, as a `Lie` tells it in
`kv_connector_extra_config`. It needs the patch `direct_read_hooks`, or a vLLM that has
`bind_gpu_block_pool` of its own.
"""

import functools
import threading
import time
from dataclasses import dataclass

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from connectors.noop import NoopConnector

SCHEDULER_METHODS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "update_connector_output",
    "take_events",
)
WORKER_METHODS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "has_connector_metadata",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
# Instead of a method: a thread of its own, which lies this often.
THREAD = "thread"
THREAD_PAUSE_S = 0.003


@dataclass(frozen=True)
class Step(KVConnectorMetadata):
    """What the connector knows of the newest step; sent to the worker, too."""

    number: int = 0
    cache_blocks: int = 0
    running: int = 0
    context_tokens: int = 0
    prefills: bool = False


class Lie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where time goes, when, and how much: a call takes the sum of all terms.

    `method` is one of the connector's, or THREAD. A call lies in every step, or in each
    `every`-th; with `prefill_only` only in steps with new prompts. With `layer` it lies
    in the hook of that layer alone. Blocks count beyond `beyond_blocks`. `waits`: it
    sleeps and leaves the GIL and the core to others, instead of computing.
    """

    method: str
    us: float = 0
    us_per_1k_blocks: float = 0
    us_per_1k_blocks_squared: float = 0
    us_per_running_request: float = 0
    us_per_1k_context_tokens: float = 0
    us_per_s: float = 0
    beyond_blocks: int = 0
    every: int = 1
    prefill_only: bool = False
    layer: int | None = None
    waits: bool = False

    def __post_init__(self) -> None:
        known = (*SCHEDULER_METHODS, *WORKER_METHODS, THREAD)
        if self.method not in known:
            raise ValueError(
                f"no method {self.method!r} to lie in; there are: {', '.join(known)}"
            )

    def us_of(self, step: Step, age_s: float) -> float:
        """What a call in `step` takes; `age_s` is how old the connector is."""
        if step.number % self.every or (self.prefill_only and not step.prefills):
            return 0.0
        blocks_1k = max(step.cache_blocks - self.beyond_blocks, 0) / 1_000
        return (
            self.us
            + self.us_per_1k_blocks * blocks_1k
            + self.us_per_1k_blocks_squared * blocks_1k**2
            + self.us_per_running_request * step.running
            + self.us_per_1k_context_tokens * step.context_tokens / 1_000
            + self.us_per_s * age_s
        )


class WorkerReport(KVConnectorWorkerMetadata):
    """Nothing; it is what makes vLLM call `update_connector_output` in each step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


class LyingConnector(NoopConnector):
    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        told = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._lie = msgspec.convert(told, Lie)
        self._made_s = time.monotonic()
        self._step = Step()
        self._block_pool = None
        method = self._lie.method
        if method != THREAD:
            # All other methods stay as cheap as those of a connector that does nothing.
            setattr(self, method, self._lying(getattr(self, method)))
        elif role == KVConnectorRole.SCHEDULER:
            threading.Thread(target=self._lie_for_ever, daemon=True).start()

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        self._block_pool = gpu_block_pool

    def build_connector_meta(self, scheduler_output) -> Step:
        scheduled = scheduler_output.num_scheduled_tokens
        new = scheduler_output.scheduled_new_reqs
        running = scheduler_output.scheduled_cached_reqs
        before = sum(request.num_computed_tokens for request in new)
        before += sum(running.num_computed_tokens)
        tokens = scheduler_output.total_num_scheduled_tokens
        self._step = Step(
            number=self._step.number + 1,
            cache_blocks=len(self._block_pool.cached_block_hash_to_block),
            running=len(scheduled),
            context_tokens=before + tokens,
            prefills=bool(new) or tokens > len(scheduled),
        )
        return self._step

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata

    def build_connector_worker_meta(self) -> WorkerReport:
        return WorkerReport()

    def _lying(self, honest):
        """The method `honest`, and then the lie."""
        layer = self._lie.layer

        @functools.wraps(honest)
        def method(*args, **kwargs):
            result = honest(*args, **kwargs)
            if layer is None or f"layers.{layer}." in args[0]:
                self._spend()
            return result

        return method

    def _spend(self) -> None:
        us = self._lie.us_of(self._step, time.monotonic() - self._made_s)
        if us and self._lie.waits:
            time.sleep(us / 1e6)
        elif us:
            # By the thread's own clock: while it is preempted, no work is done.
            end_ns = time.thread_time_ns() + us * 1e3
            while time.thread_time_ns() < end_ns:
                pass

    def _lie_for_ever(self) -> None:
        while True:
            time.sleep(THREAD_PAUSE_S)
            self._spend()
