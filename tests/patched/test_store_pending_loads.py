# SPDX-License-Identifier: Apache-2.0
"""MooncakeStore's metadata with mooncake_store_pending_loads is upstream's."""

from __future__ import annotations

from typing import Any

import pytest
from growth_lab import THOROUGH, Pair, skip_without

from costs.growth.connectors import STORE

PATCHES = ["mooncake_store_pending_loads"]
CONDITION = "if request_id not in self.load_specs:"
CONFIGS = {
    "both": {},
    "sync loads": {"extra": {"load_async": False}},
    "late lookups, decode saved": {
        "extra": {"lookup_async": True, "save_decode_cache": True}
    },
    "consumer": {"kv_role": "kv_consumer"},
}
NAMES = ["both", "sync loads", "late lookups, decode saved", "consumer"]


class StorePair(Pair):
    def __init__(self, model, edit=None, extra=None, **transfer) -> None:
        if extra:
            transfer["kv_connector_extra_config"] = extra
        super().__init__(STORE, model, edit, **transfer)

    def count(self, meta: Any) -> None:
        self.counts["loads"] += sum(one.load_spec is not None for one in meta.requests)
        self.counts["saves"] += sum(bool(one.can_save) for one in meta.requests)


@pytest.fixture(autouse=True)
def has_the_store():
    skip_without(STORE)


@pytest.mark.parametrize("config", NAMES)
def test_every_call_answers_what_upstream_answers(model, config):
    """Metadata and hits, in the real scheduler, whatever the requests do."""
    counts = StorePair(model, **CONFIGS[config]).explore(THOROUGH)
    assert counts["loads"] > 20
    assert config == "consumer" or counts["saves"] > 20
    assert min(counts[of] for of in ("preemptions", "aborts", "cached")) > 5


def test_a_load_that_is_never_sent_is_noticed(model):
    assert StorePair(model, edit=(CONDITION, "if True:")).notice()


def test_a_load_that_is_dropped_in_the_step_it_is_found_is_noticed(model):
    wrong = f"if self.load_specs.pop(request_id, None) is None or {CONDITION[3:]}"
    assert StorePair(model, edit=(CONDITION, wrong)).notice()
