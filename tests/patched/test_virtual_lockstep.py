# SPDX-License-Identifier: Apache-2.0
"""A virtual engine schedules what a real one schedules, step for step."""

from __future__ import annotations

import pytest
from overlapping import Overlapping
from virtual_lab import (
    MAX_MODEL_LEN,
    Witness,
    drive_real,
    drive_virtual,
    rounds,
    virtual_engine,
)
from vllm.distributed.kv_transfer import kv_transfer_state

from lab.serving.null_engine import NullEngine

PATCHES = ["step_timing_v1", "step_timing_v2"]

SEEDS = [1, 2, 3]
ROUNDS = 400
# Too few for all requests: some wait, some are preempted, and blocks are evicted.
FEW_BLOCKS = 700


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_has_the_same_requests_tokens_and_blocks(model, overlapping, seed):
    script = list(rounds(seed, ROUNDS))
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    real = NullEngine(
        model,
        None,
        num_blocks=FEW_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        executor=Overlapping if overlapping else None,
    )
    virtual = virtual_engine(model, FEW_BLOCKS, overlapping)
    seen_really, seen = Witness(real.core), Witness(virtual.core)
    answers_really = drive_real(real, script)
    answers = drive_virtual(virtual, script)
    for number, (ours, theirs) in enumerate(
        zip(seen.seen, seen_really.seen, strict=True)
    ):
        differ = [key for key in theirs if ours[key] != theirs[key]]
        assert not differ, (number, [(ours[key], theirs[key]) for key in differ])
    assert answers == answers_really
    assert seen.preemptions > 0
    assert any(len(step["scheduled"]) > 8 for step in seen.seen)
