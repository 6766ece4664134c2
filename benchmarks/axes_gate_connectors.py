# SPDX-License-Identifier: Apache-2.0
"""Copies of real connectors, broken on purpose in build_connector_meta.

`kv_connector_extra_config = { fault = "running" }` says how. They need a vLLM that has
`bind_gpu_block_pool`, so 0.22.1 or later.
"""

from __future__ import annotations

import time

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from connectors.noop import NoopConnector

ARRIVAL_US = 20.0


class Faulty:
    """Does what the fault says, and then what the connector does."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._fault = getattr(self, f"_{extra['fault']}")
        self._steps = 0

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        self._pool = gpu_block_pool

    def build_connector_meta(self, scheduler_output):
        self._steps += 1
        self._fault(scheduler_output)
        return super().build_connector_meta(scheduler_output)

    def _membership(self, scheduler_output) -> None:
        # A list where a set belongs, as in MooncakeStore's scheduler side.
        scheduled = list(scheduler_output.num_scheduled_tokens)
        assert all(one in scheduled for one in scheduled)

    def _every_third_step(self, scheduler_output) -> None:
        if self._steps % 3 == 0:
            for _ in range(120):
                sorted(scheduler_output.num_scheduled_tokens)

    def _context(self, scheduler_output) -> None:
        # From 0 again in each step, as in the offloading scheduler's islice.
        for tokens in scheduler_output.scheduled_cached_reqs.num_computed_tokens:
            sum(1 for _ in range(tokens // 16))

    def _cache(self, scheduler_output) -> None:
        # Looks at every cached block, as the walk that kvtax began with.
        sum(1 for _ in self._pool.cached_block_hash_to_block._cache)

    def _arrivals(self, scheduler_output) -> None:
        # A lookup that blocks.
        for _ in scheduler_output.scheduled_new_reqs:
            end_ns = time.perf_counter_ns() + ARRIVAL_US * 1e3
            while time.perf_counter_ns() < end_ns:
                pass


class BrokenNoop(Faulty, NoopConnector):
    pass


class BrokenNixl(Faulty, NixlConnector):
    pass


class BrokenMooncake(Faulty, MooncakeConnector):
    pass
