# SPDX-License-Identifier: Apache-2.0
"""Runs of free blocks are counted as stated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from studies.threads.free_queue import Rollouts


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
