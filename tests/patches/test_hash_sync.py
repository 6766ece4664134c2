# SPDX-License-Identifier: Apache-2.0
"""The worker's map of block hashes against the scheduler's block pool."""

from __future__ import annotations

import pytest
from vllm_process import ScriptProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(installed_vllm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hash_sync") / "engine"
    patches = ["mooncake_cpu_layout", "mooncake_hash_sync"]
    with ScriptProcess(folder, "hash_sync_script.py", patches) as process:
        return process.result()


def test_worker_has_the_keys_of_the_block_pool_and_blocks_that_hold_them(found):
    """After every step; wrong are exactly the ids whose change no walk can see."""
    assert found["problems"] == []


def test_workload_did_what_makes_the_map_change(found):
    counts = found["counts"]
    assert counts["steps"] > 1_500
    assert counts["held"] > 50  # of 79 blocks, some of them duplicates
    assert counts["evictions"] > 1_000
    assert counts["duplicates"] > 20
    assert counts["resets"] > 8
    assert counts["wrong"] > 0  # or the exclusion excluded nothing


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_walk_misses_a_key_that_returns_in_another_block_between_two_syncs(found, how):
    case = found[how]
    assert case["same_keys"]
    assert not case["worker_changed"]
    assert case["wrong"] == case["keys"] == 3


def test_walk_misses_that_one_of_two_blocks_with_a_key_is_evicted(found):
    case = found["duplicate"]
    assert case["still_cached_in_another"]
    assert case["worker_kept"]
    assert case["wrong"] == 1
