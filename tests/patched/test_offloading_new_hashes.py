# SPDX-License-Identifier: Apache-2.0
"""Offloading's metadata with offloading_new_hashes_only is upstream's."""

from __future__ import annotations

from typing import Any

import pytest
from growth_lab import THOROUGH, Pair, skip_without

from costs.growth.connectors import OFFLOADING

PATCHES = ["offloading_new_hashes_only"]
SHORT, LONG = {"cpu_bytes_to_use": 2**14}, {"cpu_bytes_to_use": 2**22}


class OffloadingPair(Pair):
    def __init__(self, model, edit=None, **extra: Any) -> None:
        transfer = {"kv_connector_extra_config": extra or LONG}
        super().__init__(OFFLOADING, model, edit, **transfer)

    def count(self, meta: Any) -> None:
        self.counts["loads"] += len(meta.load_jobs)
        self.counts["saves"] += len(meta.store_jobs)


@pytest.fixture(autouse=True)
def has_offloading():
    skip_without(OFFLOADING)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_every_call_answers_what_upstream_answers(model, blocks_per_chunk):
    """Metadata and hits, in the real scheduler, whatever the requests do."""
    # Offloaded in chunks of that many blocks.
    extra = LONG | {"block_size": 16 * blocks_per_chunk}
    check(OffloadingPair(model, **extra).explore(THOROUGH))


def test_a_tier_that_is_too_small_changes_nothing_about_it(model):
    check(OffloadingPair(model, **SHORT).explore(THOROUGH))


def check(counts) -> None:
    assert min(counts[of] for of in ("loads", "saves")) > 20
    assert min(counts[of] for of in ("preemptions", "aborts", "cached")) > 5


def test_a_first_hash_that_is_one_off_is_noticed(model):
    edit = ("offload_keys) + 1) - 1", "offload_keys) + 1)")
    assert OffloadingPair(model, edit=edit).notice()


def test_hashes_that_are_read_again_are_noticed(model):
    edit = ("block_hashes[start::", "block_hashes[start % 1 ::")
    assert OffloadingPair(model, edit=edit).notice()
