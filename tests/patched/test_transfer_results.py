# SPDX-License-Identifier: Apache-2.0
"""The short-circuit in the engine of each release, also of those from 0.30 on.

There the worker calls get_transfer_results, which calls get_finished.
"""

from __future__ import annotations

import asyncio
from types import MethodType

import pytest

from costs.growth.variants import before_and_after

PATCHES = ["mooncake_cpu_layout", "mooncake_get_finished_short_circuit"]
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
STEPS, RUNNING = 50, 4


@pytest.fixture
def asks_in(mooncake_engine, monkeypatch):
    """How often some decode-only steps ask an event loop of Mooncake's worker."""
    asked = []
    ask = asyncio.run_coroutine_threadsafe

    def counted(coroutine, loop):
        asked.append(coroutine.__qualname__)
        return ask(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", counted)

    def run() -> int:
        ids = mooncake_engine.decode_batch(RUNNING, STEPS)
        asked.clear()
        mooncake_engine.time(STEPS)
        found = sum("fetch_finished" in name for name in asked)
        mooncake_engine.end_batch(ids)
        return found

    return run


def test_steps_of_the_engine_ask_no_loop_when_nothing_is_transferred(asks_in):
    assert asks_in() == 0


def test_without_the_patch_each_step_asks_both_loops(
    mooncake_engine, asks_in, monkeypatch
):
    worker = mooncake_engine.first_worker
    before, _ = before_and_after(MODULE)
    upstream = MethodType(before.MooncakeConnectorWorker.get_finished, worker)
    monkeypatch.setattr(worker, "get_finished", upstream)
    assert asks_in() == 2 * STEPS
