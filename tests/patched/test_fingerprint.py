# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of vLLM's own configs tell what must be equal for a direct read."""

from __future__ import annotations

import shutil

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from connectors.direct_read import fingerprint

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"
BASE = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "block_size": 16,
    "served_model_name": "served",
}
DIFFERENT = {
    "served_model_name": {"served_model_name": ["other", "a"]},
    "revision": {"revision": "other"},
    "dtype": {"dtype": "float32"},
    "block_size": {"block_size": 32},
    "cache_dtype": {"kv_cache_dtype": "float16"},
    "prefix_caching_hash_algo": {"prefix_caching_hash_algo": "sha256_cbor"},
    "hf_config": {"hf_overrides": {"rope_theta": 5.0}},
}


@pytest.fixture
def fingerprint_of(monkeypatch):
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)

    def fingerprint_of(model, seed: str = "0", **arguments) -> dict[str, str]:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(sha256_cbor)
        args = EngineArgs(model=str(model), **BASE | arguments)
        return fingerprint.of(args.create_engine_config(), {"spec": "full"})

    return fingerprint_of


def test_path_and_memory_are_no_difference(fingerprint_of, model, tmp_path):
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    theirs = fingerprint_of(elsewhere, gpu_memory_utilization=0.5)
    assert fingerprint.difference(fingerprint_of(model), theirs) is None


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_named(fingerprint_of, model, name):
    theirs = fingerprint_of(model, **DIFFERENT[name])
    assert f"{name} is " in fingerprint.difference(fingerprint_of(model), theirs)


def test_another_hash_seed_is_a_difference(fingerprint_of, model):
    theirs = fingerprint_of(model, seed="1")
    assert "NONE_HASH is " in fingerprint.difference(fingerprint_of(model), theirs)


def test_neither_the_seed_itself_nor_the_path_is_given_away(fingerprint_of, model):
    values = fingerprint_of(model).values()
    for secret in (kv_cache_utils.NONE_HASH.hex(), str(model)):
        assert not any(secret in value for value in values)


def test_what_differs_is_named_with_both_values():
    ours = {"model": "m", "block_size": "16", "ours": "1"}
    assert fingerprint.difference(ours, dict(ours)) is None
    theirs = {"model": "m", "block_size": "32", "theirs": "2"}
    assert fingerprint.difference(ours, theirs) == (
        "block_size is 16 here and 32 there; ours is 1 here and not given there; "
        "theirs is not given here and 2 there"
    )


def test_a_different_seed_is_told_with_what_to_set():
    assert "PYTHONHASHSEED" in fingerprint.difference(
        {"NONE_HASH": "1"}, {"NONE_HASH": "2"}
    )
