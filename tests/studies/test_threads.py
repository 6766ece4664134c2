# SPDX-License-Identifier: Apache-2.0
"""Runs of free blocks, and batches that pass or are refused, are counted as stated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from studies.threads.free_queue import Rollouts
from studies.threads.tcp_queue import Batch, _row


@pytest.mark.parametrize(
    ("ids", "runs", "descending"),
    [
        ([1, 2, 3, 4, 5], 1, 0.0),
        ([5, 4, 3, 2, 1], 5, 1.0),
        ([7, 8, 3, 2, 9], 4, 0.25),
    ],
)
def test_a_run_is_of_ids_that_ascend_by_one(ids, runs, descending):
    rollouts = Rollouts.__new__(Rollouts)
    blocks = [SimpleNamespace(block_id=block) for block in ids]
    queue = SimpleNamespace(get_all_free_blocks=lambda: blocks)
    rollouts.pool = SimpleNamespace(free_block_queue=queue)
    assert rollouts.next_blocks() == (runs, descending)


def test_a_batch_counts_the_calls_that_pass_and_the_median_call_of_each_round():
    rounds = [[(True, 9.0), (True, 1.0), (False, 2.0)]] * 6
    row = _row(Batch(0, 2_304, 2), rounds)
    assert (row.limit, row.passed, row.calls) == (1_024, 12, 18)
    assert row.ms.value == 2.0
