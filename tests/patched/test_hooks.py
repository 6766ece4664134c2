# SPDX-License-Identifier: Apache-2.0
"""A real scheduler gives a connector the block pool, and its steps begin and end."""

from __future__ import annotations

import pytest
from hooks_lab import run

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"


@pytest.mark.parametrize("how", ["alone", "in_multi_with_two_steps_in_flight"])
def test_blocks_are_offered_when_they_are_written(model, how):
    in_flight = 1 if how == "alone" else 2
    found = run(model, how)
    counts = found.counts
    assert not found.problems, found.problems[:20]
    assert counts[f"with {in_flight} in flight"] > 100, counts
    assert counts["in_flight after schedule"] > 100, counts
    assert counts["offered after update"] > 1_000, counts
    begun, done, updated = found.steps()
    assert begun == done == updated > 100


@pytest.mark.parametrize("how", ["alone", "in_multi_with_two_steps_in_flight"])
def test_an_idle_engine_offers_all_that_is_cached(model, how):
    offered, cached = run(model, how).offered_of_cached()
    assert offered == cached > 10


def test_a_ledger_that_is_a_step_early_is_noticed(model):
    assert run(model, "alone", "a step early").problems
