# SPDX-License-Identifier: Apache-2.0
"""What the host takes is exposed or hidden as vLLM's own scheduling has it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from virtual_lab import FORWARD_NS, Witness, virtual_engine

PATCHES = ["step_timing_v1", "step_timing_v2"]

BLOCKS = 700
TOKENS = 20
SHORT_NS, LONG_NS = FORWARD_NS // 2, FORWARD_NS * 2


def token_times_ns(engine) -> list[int]:
    """When each of the tokens of one request is there."""
    engine.add("0", [1] * 100, TOKENS, None)
    ended_ns = []
    while engine.has_work:
        if outputs := engine.step():
            ended_ns += [engine.clock.now_ns] * len(outputs.outputs)
    return ended_ns


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_host_that_takes_no_time_leaves_a_forward_per_step(model, overlapping):
    found = token_times_ns(virtual_engine(model, BLOCKS, overlapping))
    assert found == [FORWARD_NS * step for step in range(1, TOKENS + 1)]


def test_synchronous_scheduling_adds_the_host_s_time_to_every_step(model):
    engine = virtual_engine(model, BLOCKS, False, base_us=SHORT_NS / 1e3)
    step_ns = FORWARD_NS + SHORT_NS
    assert token_times_ns(engine) == [step_ns * step for step in range(1, TOKENS + 1)]


def test_asynchronous_scheduling_hides_a_host_that_is_faster_than_the_device(model):
    engine = virtual_engine(model, BLOCKS, True, base_us=SHORT_NS / 1e3)
    found = token_times_ns(engine)
    # The first step has none before it to hide behind.
    assert found == [SHORT_NS + FORWARD_NS * step for step in range(1, TOKENS + 1)]


def test_a_host_that_is_slower_than_the_device_sets_the_pace(model):
    engine = virtual_engine(model, BLOCKS, True, base_us=LONG_NS / 1e3)
    found = token_times_ns(engine)
    between_ns = {after - one for one, after in pairwise(found)}
    assert between_ns == {LONG_NS}


def test_a_walk_costs_its_slope_times_the_cache_in_every_step(model):
    slope_us = 60.0
    plain = virtual_engine(model, BLOCKS, False)
    walk = virtual_engine(model, BLOCKS, False, us_per_1k_cached_blocks=slope_us)
    seen = Witness(walk.core)
    took_ns = [engine_ns[-1] for engine_ns in map(token_times_ns, (plain, walk))]
    cached = [step["cached"] for step in seen.seen][:TOKENS]
    assert cached[-1] > cached[0] > 0
    assert took_ns[1] - took_ns[0] == sum(round(slope_us * blocks) for blocks in cached)
