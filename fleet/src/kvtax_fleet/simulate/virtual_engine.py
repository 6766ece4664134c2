# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine core on a virtual clock, with an executor that computes nothing.

Engine core, scheduler, KV cache manager, block pool and the connector's scheduler side
are those of the vLLM that this process imports, called as vLLM's own loop calls them.
Between two calls of an engine core nothing can reach it from outside, in vLLM too. So
one whole call is made at the moment at which it begins, and the engine's clock says
when it ends: the executor moves it to the moment at which the host is done with its
part, and waiting for a result moves it to the end of that forward.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from kvtax.engine.null_engine import request_of
from vllm.distributed.kv_events import KVCacheEvent
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvtax_fleet.records.exposition import Gauges
from kvtax_fleet.simulate.cost import Step, StepCost

# A block's hash, as KV events name it.
Hash = bytes | int

# EngineCoreProc's sleep when requests wait and none could be scheduled.
IDLE_NS = 1_000_000
# Returns a worker's report, from a step's connector metadata and the time in ns.
Moves = Callable[[Any, int], KVConnectorOutput | None]
# Memory of the device, without limit: the number of blocks is given.
ENDLESS_BYTES = 1 << 50


@dataclass
class EngineClock:
    """The time of the engine core, on the fleet's clock."""

    now_ns: int = 0

    def advance_to(self, ns: int) -> None:
        self.now_ns = max(self.now_ns, ns)


class StepFuture:
    """A step's output, ready when the device has ended its forward.

    It has the part of a Future that vLLM's loop uses.
    """

    def __init__(
        self, clock: EngineClock, output: ModelRunnerOutput, ready_ns: int
    ) -> None:
        self._clock = clock
        self.output = output
        self._ready_ns = ready_ns

    def done(self) -> bool:
        return self._ready_ns <= self._clock.now_ns

    def result(self) -> ModelRunnerOutput:
        self._clock.advance_to(self._ready_ns)
        return self.output


class NoDevice(Executor):
    """An executor whose device runs one forward after the other, taking only time."""

    def _init_executor(self) -> None:
        self._device_free_ns = 0

    def attach(
        self, core: EngineCore, clock: EngineClock, cost: StepCost, moves: Moves | None
    ) -> None:
        """Connect the executor to its engine, before the first step."""
        scheduler = scheduler_of(core)
        self._requests = scheduler.requests
        self._pool = scheduler.kv_cache_manager.block_pool
        self._clock = clock
        self._cost = cost
        self._moves = moves

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return one layer: all layers of a model have the same blocks."""
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=32,
            dtype=torch.bfloat16,
        )
        return [{"layer": spec}]

    def determine_available_memory(self) -> list[int]:
        return [ENDLESS_BYTES]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Do nothing: there is no memory to set up."""

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Any:
        step = self._step(scheduler_output)
        self._clock.now_ns += self._cost.host_ns(step)
        begins_ns = max(self._clock.now_ns, self._device_free_ns)
        self._device_free_ns = begins_ns + self._cost.device_ns(step)
        output = self._output(scheduler_output)
        if self._moves is not None:
            metadata = scheduler_output.kv_connector_metadata
            output.kv_connector_output = self._moves(metadata, self._clock.now_ns)
        self._launched = StepFuture(self._clock, output, self._device_free_ns)
        return self._launched

    def sample_tokens(self, grammar_output: object, non_block: bool = False) -> Any:
        """Return the last step's output, as asynchronous scheduling takes it."""
        return self._launched

    def _step(self, scheduler_output: SchedulerOutput) -> Step:
        scheduled = scheduler_output.num_scheduled_tokens
        new = scheduler_output.scheduled_new_reqs
        cached = scheduler_output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {each.req_id: each.num_computed_tokens for each in new}
        attended = sum(
            count * before[request_id] + count * (count - 1) // 2
            for request_id, count in scheduled.items()
        )
        return Step(
            requests=len(scheduled),
            new_requests=len(new),
            tokens=scheduler_output.total_num_scheduled_tokens,
            context_tokens=sum(before.values()),
            attended_tokens=attended,
            cached_blocks=len(self._pool.cached_block_hash_to_block),
        )

    def _output(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Sample token 0 for each request whose known tokens are all computed."""
        ids = list(scheduler_output.num_scheduled_tokens)
        requests = map(self._requests.__getitem__, ids)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: place for place, each in enumerate(ids)},
            sampled_token_ids=[
                [0] if each.num_computed_tokens >= each.num_tokens else []
                for each in requests
            ],
        )

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"there is no worker: {method}")

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        """Return nothing: no worker has an address."""
        return []

    def check_health(self) -> None:
        """Do nothing: the executor cannot fail."""


class OverlappingNoDevice(NoDevice):
    """Supports vLLM's asynchronous scheduling: a step is scheduled while one runs."""

    max_concurrent_batches = 2

    def _init_executor(self) -> None:
        super()._init_executor()
        # vLLM's CPU platform turned it off; scheduler and engine loop are made later.
        self.scheduler_config.async_scheduling = True


@cache
def _parser() -> FlexibleArgumentParser:
    """Return the parser of vLLM's server. Making it takes longer than an engine."""
    parser: Any = FlexibleArgumentParser
    return make_arg_parser(parser())


def _block_hasher(block_tokens: int) -> Callable[[Request], list[BlockHash]]:
    """Return a function that hashes a request's full blocks that have no hash yet.

    As vLLM's own, which is slower: a block's hash depends on its tokens and on all
    before it, and on nothing else.
    """
    size = array("i").itemsize * block_tokens

    def hashes(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        hashed_blocks, blocks = len(known), request.num_tokens // block_tokens
        if hashed_blocks == blocks:
            return []
        new = slice(hashed_blocks * block_tokens, blocks * block_tokens)
        tokens = request.all_token_ids[new]
        data = array("i", tokens).tobytes()
        last: bytes = known[-1] if known else b""
        hashed = []
        for begin in range(0, len(data), size):
            last = blake2b(last + data[begin : begin + size], digest_size=32).digest()
            hashed.append(BlockHash(last))
        return hashed

    return hashes


def _says_something(queued: tuple[Any, ...]) -> bool:
    """Return whether a batch that the core has queued has tokens, or news of KV."""
    future, scheduled, *_ = queued
    news = future.output.kv_connector_output
    return bool(scheduled.total_num_scheduled_tokens or news is not None)


def scheduler_of(core: EngineCore) -> Scheduler:
    """Return the core's scheduler, which is vLLM's own class."""
    assert isinstance(core.scheduler, Scheduler)
    return core.scheduler


class VirtualEngine:
    """An engine core with the `arguments` of a vLLM server.

    With `overlapping` it schedules asynchronously. `moves` is the worker side of its
    connector, if that moves KV.
    """

    def __init__(
        self,
        arguments: list[str],
        cost: StepCost,
        overlapping: bool,
        moves: Moves | None = None,
    ) -> None:
        parsed = AsyncEngineArgs.from_cli_args(_parser().parse_args(arguments))
        config = parsed.create_engine_config()
        executor = OverlappingNoDevice if overlapping else NoDevice
        self.core = EngineCore(config, executor, log_stats=True)
        self.clock = EngineClock()
        self._idle = False
        self.scheduler = scheduler_of(self.core)
        block_tokens = config.cache_config.block_size
        self.core.request_block_hasher = _block_hasher(block_tokens)
        self.core.model_executor.attach(self.core, self.clock, cost, moves)
        # Only a GPU's cascade attention needs it, and it walks a request's blocks.
        manager: Any = self.scheduler.kv_cache_manager
        manager.get_num_common_prefix_blocks = lambda request_id: [0]
        self.stream_interval = config.scheduler_config.stream_interval

    @property
    def has_work(self) -> bool:
        """Return whether EngineCoreProc's loop would go on."""
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    @property
    def only_waits_for_kv(self) -> bool:
        """Return whether the last step did nothing, nor will those that follow.

        All requests wait for KV to arrive, and none has: until a worker reports, or a
        message comes.
        """
        scheduler = self.scheduler
        news = (
            scheduler.running
            or scheduler.finished_recving_kv_req_ids
            or scheduler.failed_recving_kv_req_ids
            or scheduler.has_finished_requests()
            or any(map(_says_something, self.core.batch_queue or ()))
        )
        return self._idle and not news and self._all_wait_for_kv

    @property
    def _all_wait_for_kv(self) -> bool:
        return all(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in self.scheduler.requests.values()
            if not request.is_finished()
        )

    @property
    def gauges(self) -> Gauges:
        running, waiting = self.scheduler.get_request_counts()
        return Gauges(running, waiting, self.scheduler.kv_cache_manager.usage)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        output_tokens: int,
        kv_transfer_params: dict[str, Any] | None,
    ) -> None:
        """Queue a request that ends after exactly `output_tokens`."""
        request = self._request(request_id, prompt, output_tokens, kv_transfer_params)
        self.core.add_request(request)

    def _request(
        self,
        request_id: str,
        prompt: list[int],
        output_tokens: int,
        kv_transfer_params: dict[str, Any] | None,
    ) -> Request:
        arrival_s = self.clock.now_ns / 1e9
        made = request_of(
            request_id, prompt, output_tokens, kv_transfer_params, arrival_s
        )
        return self.core.preprocess_add_request(made)[0]

    def block_hashes(self, prompt: list[int]) -> list[Hash]:
        """Return the hashes of the prompt's full blocks, as KV events name them."""
        hashes = self._request("", prompt, 1, None).block_hashes
        return [maybe_convert_block_hash(each) for each in hashes]

    def on_events(self, receive: Callable[[list[KVCacheEvent], int], None]) -> None:
        """Call `receive` with the KV events of each step, and the time of its end.

        Only with --kv-events-config.
        """
        publisher: Any = self.scheduler.kv_event_publisher
        publisher.publish = lambda batch: receive(batch.events, self.clock.now_ns)

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id])

    def step(self) -> EngineCoreOutputs | None:
        """Do one round of EngineCoreProc's loop; advance the clock to its end."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        self._idle = not executed and self.scheduler.has_unfinished_requests()
        if self._idle:
            self.clock.now_ns += IDLE_NS
        return outputs.get(0) if outputs else None
