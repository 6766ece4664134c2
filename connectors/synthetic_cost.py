# SPDX-License-Identifier: Apache-2.0
"""KV connector of known cost per step, to check measurements against.

The connector moves no KV and only spends time in its methods, as configured by the
list of `Cost`, `costs`, in `kv_connector_extra_config`. Needs the patch
`direct_read_hooks`, or a vLLM with its own `bind_gpu_block_pool`.
"""

import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connectors.noop import NoopConnector
from connectors.synthetic_process import BLOCKS, PAUSE_S, burn, start_process

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
# In place of a method: a thread of the connector, or a process that it starts; with
# PAUSE_S between two costs.
THREAD, PROCESS = "thread", "process"
# In place of a method, too: whenever a block is evicted; in the API server, for each
# request that runs in a step; and memory that is kept for each block that was cached.
EVICTED, API_SERVER, LEAK = "evicted", "api_server", "leak"
NO_METHODS = (THREAD, PROCESS, EVICTED, API_SERVER, LEAK)
# A name is no reason not to count a thread.
THREAD_NAME = "records-of-blocks"


@dataclass(frozen=True)
class Step(KVConnectorMetadata):
    """State of the newest step; the worker receives a copy."""

    number: int = 0
    cache_blocks: int = 0
    running: int = 0
    context_tokens: int = 0
    prefills: bool = False
    since_reset_s: float = 0.0
    # Of the step before: whether it had new prompts, |cache|, and the time since.
    after_prefills: bool = False
    blocks_before: int = 0
    idle_s: float = 0.0


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time spent in one method; a call takes the sum of all terms.

    `method` is a method of the connector, or one of NO_METHODS. The cost arises in
    every step, or in each `every`-th; with `prefill_only` only in steps with new
    prompts, with `after_prefill` only in steps behind those; with `after_idle_s` only
    in a step that comes so long after the one before; with `each_blocks` only when
    |cache| passes a multiple of it; with `on_hit` only for a request with cached
    blocks; with `layer` only in the hook of that layer; with `from_blocks` only with
    so many cached blocks, with `below_blocks` only with fewer, with `from_running` only
    with so many scheduled requests. A call takes no more than `at_most_us`. With
    `waits`, the method sleeps and leaves the GIL and the core to others. With
    `is_object` it is an object that is called, which the recorder does not time. A
    process has `us_per_1k_blocks` alone, a leak `kib_per_block`.
    """

    method: str
    us: float = 0
    us_per_1k_blocks: float = 0
    us_per_1k_blocks_squared: float = 0
    us_per_running_request: float = 0
    us_per_1k_context_tokens: float = 0
    us_per_s: float = 0
    us_per_s_since_reset: float = 0
    kib_per_block: int = 0
    from_blocks: int = 0
    below_blocks: int | None = None
    each_blocks: int | None = None
    from_running: int = 0
    at_most_us: float = math.inf
    every: int = 1
    prefill_only: bool = False
    after_prefill: bool = False
    after_idle_s: float = 0.0
    on_hit: bool = False
    layer: int | None = None
    waits: bool = False
    is_object: bool = False

    def __post_init__(self) -> None:
        known = (*SCHEDULER_METHODS, *WORKER_METHODS, *NO_METHODS)
        if self.method not in known:
            raise ValueError(
                f"no method {self.method!r}; the connector has {', '.join(known)}"
            )

    def us_of(self, step: Step, age_s: float) -> float:
        """Return the cost of a call in `step`; `age_s` is the connector's age."""
        if not self._arises_in(step):
            return 0.0
        blocks_1k = step.cache_blocks / 1_000
        us = (
            self.us
            + self.us_per_1k_blocks * blocks_1k
            + self.us_per_1k_blocks_squared * blocks_1k**2
            + self.us_per_running_request * step.running
            + self.us_per_1k_context_tokens * step.context_tokens / 1_000
            + self.us_per_s * age_s
            + self.us_per_s_since_reset * step.since_reset_s
        )
        return min(us, self.at_most_us)

    def _arises_in(self, step: Step) -> bool:
        blocks = step.cache_blocks
        each, below = self.each_blocks, self.below_blocks
        return not (
            step.number % self.every
            or (self.prefill_only and not step.prefills)
            or (self.after_prefill and not step.after_prefills)
            or step.idle_s < self.after_idle_s
            or blocks < self.from_blocks
            or (below is not None and blocks >= below)
            or (each is not None and blocks // each <= step.blocks_before // each)
            or step.running < self.from_running
        )


class WorkerReport(KVConnectorWorkerMetadata):
    """Empty report: makes vLLM call `update_connector_output` in each step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


class ApiServerStats(KVConnectorStats):
    """Time that the API server is to spend, in us."""

    def reset(self) -> None:
        self.data = {"us": 0.0}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = {"us": self.data["us"] + other.data["us"]}
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def is_empty(self) -> bool:
        return not self.data.get("us")


class ApiServerMetrics(KVConnectorPromMetrics):
    """Spends the time of ApiServerStats, in the API server."""

    def observe(
        self, transfer_stats_data: dict[str, float], engine_idx: int = 0
    ) -> None:
        burn(transfer_stats_data["us"])


class Object:
    """Object that is called in the place of a method."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class SyntheticCostConnector(NoopConnector):
    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._costs = msgspec.convert(options["costs"], list[Cost])
        self._made_s = self._last_s = time.monotonic()
        self._step = Step()
        self._leaked: list[bytes] = []
        self._block_pool: BlockPool | None = None
        # vLLM makes another map at a reset of the prefix cache.
        self._cached: object = None
        self._reset_s = self._made_s
        self._shared: mmap | None = None
        for cost in self._costs:
            if cost.method not in NO_METHODS:
                self._wrap(cost, role)
            elif role != KVConnectorRole.SCHEDULER:
                continue
            elif cost.method == THREAD:
                threading.Thread(
                    target=self._spend_for_ever, name=THREAD_NAME, daemon=True
                ).start()
            elif cost.method == PROCESS:
                self._shared = start_process(cost.us_per_1k_blocks)

    def _wrap(self, cost: Cost, role: KVConnectorRole) -> None:
        """Replace the method of `cost`; all others stay as cheap as the no-op's."""
        method = self._with_cost(getattr(self, cost.method), cost)
        if not cost.is_object:
            setattr(self, cost.method, method)
        elif role == KVConnectorRole.WORKER:
            # An attribute of an instance is timed, whatever it is.
            setattr(type(self), cost.method, Object(method))

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._block_pool = gpu_block_pool
        costs = {cost.method: cost for cost in self._costs}
        if costs.keys() & {EVICTED, LEAK}:
            _listen(gpu_block_pool, self._on_cached, self._on_evicted)

    def _on_cached(self) -> None:
        for cost in self._costs:
            if cost.method == LEAK:
                self._leaked.append(b"x" * (cost.kib_per_block * 1_024))

    def _on_evicted(self) -> None:
        for cost in self._costs:
            if cost.method == EVICTED:
                self._spend(cost)

    def build_connector_meta(
        self, scheduler_output: "SchedulerOutput"
    ) -> KVConnectorMetadata:
        assert self._block_pool is not None
        scheduled = scheduler_output.num_scheduled_tokens
        new = scheduler_output.scheduled_new_reqs
        running = scheduler_output.scheduled_cached_reqs
        before = sum(request.num_computed_tokens for request in new)
        before += sum(running.num_computed_tokens)
        tokens = scheduler_output.total_num_scheduled_tokens
        cached, now_s = self._block_pool.cached_block_hash_to_block, time.monotonic()
        if cached is not self._cached:
            self._cached, self._reset_s = cached, now_s
        self._step = Step(
            number=self._step.number + 1,
            cache_blocks=len(cached),
            running=len(scheduled),
            context_tokens=before + tokens,
            prefills=bool(new) or tokens > len(scheduled),
            since_reset_s=now_s - self._reset_s,
            after_prefills=self._step.prefills,
            blocks_before=self._step.cache_blocks,
            idle_s=now_s - self._last_s,
        )
        self._last_s = now_s
        if self._shared is not None:
            BLOCKS.pack_into(self._shared, 0, self._step.cache_blocks)
        return self._step

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata

    def build_connector_worker_meta(self) -> WorkerReport:
        return WorkerReport()

    def get_kv_connector_stats(self) -> ApiServerStats | None:
        age_s = time.monotonic() - self._made_s
        us = sum(
            cost.us_of(self._step, age_s) * self._step.running
            for cost in self._costs
            if cost.method == API_SERVER
        )
        return ApiServerStats(data={"us": us}) if us else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, float] | None = None
    ) -> ApiServerStats:
        return ApiServerStats(data=data or {"us": 0.0})

    @classmethod
    def build_prom_metrics(cls, *configs: Any) -> ApiServerMetrics:
        return ApiServerMetrics(*configs)

    def _with_cost(self, free: Callable[..., Any], cost: Cost) -> Callable[..., Any]:
        """Return a method that calls `free`, then spends the cost."""

        @functools.wraps(free)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = free(*args, **kwargs)
            if cost.on_hit and not args[1]:
                return result
            if cost.layer is None or f"layers.{cost.layer}." in args[0]:
                self._spend(cost)
            return result

        return method

    def _spend(self, cost: Cost) -> None:
        us = cost.us_of(self._step, time.monotonic() - self._made_s)
        if us and cost.waits:
            time.sleep(us / 1e6)
        elif us:
            burn(us)

    def _spend_for_ever(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            for cost in self._costs:
                if cost.method == THREAD:
                    self._spend(cost)


def _listen(
    block_pool: "BlockPool",
    on_cached: Callable[[], None],
    on_evicted: Callable[[], None],
) -> None:
    """Have the patched pool call back for each block that it caches or evicts."""
    from vllm.v1.core.block_pool_listener import BlockPoolListener

    class Listener(BlockPoolListener):
        def on_block_cached(self, key: "BlockHashWithGroupId", block_id: int) -> None:
            on_cached()

        def on_block_evicted(self, key: "BlockHashWithGroupId", block_id: int) -> None:
            on_evicted()

        def on_cache_reset(self) -> None:
            pass

    block_pool.add_listener(Listener())
