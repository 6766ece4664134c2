# SPDX-License-Identifier: Apache-2.0
"""The worker's map of block hashes against the scheduler's block pool.

Told by a walk, or by block_pool_delta_listener's deltas; or by nobody.
"""

from __future__ import annotations

import pytest
from vllm_process import ScriptProcess

pytestmark = pytest.mark.slow

WALK = ["mooncake_cpu_layout", "mooncake_hash_sync"]
LISTENER = [*WALK, "block_pool_delta_listener"]


def run(tmp_path_factory, how: str, patches: list[str]) -> dict:
    folder = tmp_path_factory.mktemp("hash_sync") / how
    with ScriptProcess(folder, "hash_sync_script.py", patches, how) as process:
        return process.result()


@pytest.fixture(scope="module")
def walk(installed_vllm, tmp_path_factory):
    return run(tmp_path_factory, "walk", WALK)


@pytest.fixture(scope="module")
def deltas(installed_vllm, tmp_path_factory):
    return run(tmp_path_factory, "deltas", LISTENER)


@pytest.fixture(scope="module")
def nobody_reads(installed_vllm, tmp_path_factory):
    return run(tmp_path_factory, "nobody_reads", LISTENER)


@pytest.mark.parametrize("how", ["walk", "deltas", "nobody_reads"])
def test_workload_did_what_makes_the_map_change(request, how):
    counts = request.getfixturevalue(how)["counts"]
    assert counts["steps"] > 1_500
    assert counts["held"] > 50  # of 79 blocks, some of them duplicates
    assert counts["evictions"] > 1_000
    assert counts["duplicates"] > 20
    assert counts["resets"] > 8


def test_walked_worker_has_the_pools_keys_and_blocks_that_hold_them(walk):
    """After every step; wrong are exactly the ids whose change no walk can see."""
    assert walk["problems"] == []
    assert walk["counts"]["wrong"] > 0  # or the exclusion excluded nothing


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_walk_misses_a_key_that_returns_in_another_block_between_two_syncs(walk, how):
    case = walk[how]
    assert case["same_keys"]
    assert not case["worker_changed"]
    assert case["wrong"] == case["keys"] == 3


def test_walk_misses_that_one_of_two_blocks_with_a_key_is_evicted(walk):
    case = walk["duplicate"]
    assert case["still_cached_in_another"]
    assert case["worker_kept"]
    assert case["wrong"] == 1


def test_worker_told_by_deltas_has_the_pools_map_after_every_step(deltas):
    """Each key with the very block that a lookup in the pool finds."""
    assert deltas["problems"] == []
    # Most steps cache no block and ship nothing.
    assert 100 < deltas["counts"]["shipped"] < deltas["counts"]["steps"]


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_deltas_move_a_key_that_returns_in_another_block_between_two_syncs(deltas, how):
    case = deltas[how]
    assert case["same_keys"]
    assert case["worker_changed"]
    assert case["wrong"] == 0
    assert case["keys"] == 3


def test_deltas_tell_that_one_of_two_blocks_with_a_key_is_evicted(deltas):
    case = deltas["duplicate"]
    assert case["still_cached_in_another"]
    assert not case["worker_kept"]
    assert case["wrong"] == 0


def test_nobody_subscribes_and_nothing_is_shipped_if_nobody_reads(nobody_reads):
    assert nobody_reads["listeners"] == 0
    assert nobody_reads["counts"].get("shipped", 0) == 0
    assert nobody_reads["worker_map"] == 0
