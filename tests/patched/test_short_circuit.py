# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with the short-circuit, in a real engine.

What each step reports is compared with upstream's in
tests/patches/test_mooncake_protocol.py; storms of aborts run with this patch, too.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from abort_lab import SHORT_CIRCUIT, code
from mooncake_world import World

PATCHES = ["mooncake_cpu_layout"]
STEPS = 50


@pytest.mark.parametrize("version", ["upstream", "patched"])
def test_upstreams_steps_ask_both_loops_and_patched_ones_none_if_nothing_is_sent(
    mooncake_engine, version
):
    """From 0.30 on the engine calls get_transfer_results, which calls get_finished."""
    World(mooncake_engine, code(SHORT_CIRCUIT) if version == "patched" else code())
    ids = mooncake_engine.decode_batch(4, STEPS)
    asked, ask = [], asyncio.run_coroutine_threadsafe

    def counted(coroutine, loop):
        asked.append(coroutine.__qualname__)
        return ask(coroutine, loop)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", counted)
        mooncake_engine.time(STEPS)
    mooncake_engine.end_batch(ids)
    found = sum("fetch_finished" in name for name in asked)
    assert found == (2 * STEPS if version == "upstream" else 0)


def test_a_stuck_send_is_freed_in_time_and_transfers_still_end(mooncake_engine):
    """In an engine that other requests keep stepping; the timeout is 1 s."""
    world = World(mooncake_engine, code(SHORT_CIRCUIT), timeout_s=1)
    prefill = world.prefill("t")
    world.until(lambda: world.fates[prefill].complete)
    began_s, steps_s = time.monotonic(), []

    def freed() -> bool:
        steps_s.append(time.monotonic() - began_s)
        return not world.known([prefill])

    world.until(freed)
    world.prefill("u")
    decode = world.decode("u")
    assert world.settle() == []
    assert steps_s[-1] >= 1.0
    # Within a second of 2 ms each, however long the machine takes for one.
    assert sum(step_s > 1.0 for step_s in steps_s) <= 500
    assert world.fates[decode].pulled_tokens == 70
