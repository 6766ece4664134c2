# SPDX-License-Identifier: Apache-2.0
"""A real scheduler gives a connector the block pool, and its steps begin and end."""

from __future__ import annotations

from pathlib import Path

import pytest
from patched_tree import run_script

from lab.serving.environment import engine_environment
from lab.serving.null_model import null_checkpoint
from lab.serving.ports import reserve
from lab.serving.settings import CPU_ENGINE

pytestmark = pytest.mark.long

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]


def run(folder: Path, *arguments: str) -> dict:
    model = null_checkpoint(folder / "model")
    env = engine_environment(folder / "tree", CPU_ENGINE, reserve(1)[0])
    return run_script(
        folder, "hooks_script.py", PATCHES, str(model), *arguments, env=env
    )


@pytest.mark.parametrize(
    ("how", "scheduling", "in_flight"), [("alone", "sync", 1), ("in_multi", "async", 2)]
)
def test_blocks_are_offered_when_they_are_written(tmp_path, how, scheduling, in_flight):
    found = run(tmp_path, how, scheduling, "as it is")
    counts = found["counts"]
    assert not found["problems"], found["problems"]
    assert counts[f"with {in_flight} in flight"] > 100, counts
    assert counts["in_flight after schedule"] > 100, counts
    assert counts["offered after update"] > 1_000, counts
    # Each step that began has ended, and what is cached then is offered.
    begun, done, updated = found["steps"]
    assert begun == done == updated > 100
    assert found["offered"] == found["cached"] > 10


def test_a_ledger_that_is_a_step_early_is_noticed(tmp_path):
    assert run(tmp_path, "alone", "sync", "a step early")["problems"]
