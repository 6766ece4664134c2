# SPDX-License-Identifier: Apache-2.0
"""However many requests pull, and however few blocks there are, all of them end."""

from __future__ import annotations

import random

import pytest
from admission_witness import BLOCK_SIZE, MAX_STEPS, AdmissionWitness
from vllm.distributed.kv_transfer import kv_transfer_state

from lab.serving.null_engine import NullEngine

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"
CONTROLS = ["admits all", "lets none pass", "reserves nothing"]
WITNESS = {
    "kv_connector": "AdmissionWitness",
    "kv_connector_module_path": "admission_witness",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
NUM_BLOCKS = 60
MOST_BLOCKS = 45
MOST_OUTPUT_TOKENS = 40
REQUESTS = 1_500
AT_ONCE = 12
# Whoever is answered and has pulled is so before.
STALLED_STEPS = 20 * MAX_STEPS


def run(engine: NullEngine, chance: random.Random) -> bool:
    """Whether all requests ended, rather than that nothing did any more."""
    scheduler = engine.core.scheduler
    left, idle_steps = REQUESTS, 0
    executed = True
    while left or scheduler.has_requests():
        while left and scheduler.get_num_unfinished_requests() < AT_ONCE:
            tokens = chance.randrange(1, MOST_BLOCKS * BLOCK_SIZE)
            prompt = [chance.randrange(1, 500) for _ in range(tokens)]
            name = engine.add(prompt, chance.randrange(1, MOST_OUTPUT_TOKENS))
            left -= 1
        # Not an idle engine's: that could end what stands still.
        if executed and chance.random() < 0.02:
            engine.core.abort_requests([name])
        _, executed = engine.core.step_fn()
        idle_steps = 0 if executed else idle_steps + 1
        if idle_steps > STALLED_STEPS:
            engine.core.abort_requests(list(scheduler.requests))
            engine.run_to_end()
            return False
    return True


@pytest.fixture(scope="module")
def engine(model):
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    return NullEngine(model, WITNESS, NUM_BLOCKS)


def outcome(engine: NullEngine, admission: str, seed: int) -> dict:
    AdmissionWitness.begin(admission, seed)
    ended = run(engine, random.Random(seed))
    assert engine.core.scheduler.reset_prefix_cache()
    return {"ended": ended} | AdmissionWitness.counted()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_request_waits_for_ever(engine, seed):
    found = outcome(engine, "as it is", seed)
    assert found["ended"], found
    assert found["pulls"] > 100, found
    assert found["held_back"] > 100, found
    assert found["left_waiting"] == 0, found


@pytest.mark.long
@pytest.mark.parametrize("control", CONTROLS)
def test_without_a_rule_the_engine_stands_still(engine, control):
    found = outcome(engine, control, 1)
    assert not found["ended"], found
