# SPDX-License-Identifier: Apache-2.0
"""What is served fits the GPU that it is served on, whichever it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.paths import CONFIGS
from lab.serving.gpu_fit import (
    LEAST_BLOCKS,
    DoesNotFit,
    embedding_bytes,
    fit_shape,
    fit_weights,
    kv_bytes_per_token_and_layer,
    layer_bytes,
    usable_bytes,
)

QWEN = json.loads((CONFIGS / "models" / "qwen3-coder-30b-a3b.json").read_text())
GIB = 2**30
BLOCKS, BLOCK_TOKENS = 18_000, 16
# Of a dense model, tied embeddings, no head_dim: facebook/opt's and Llama's kind.
DENSE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def needed_bytes(config: dict, layers: int, blocks: int) -> int:
    kv = blocks * BLOCK_TOKENS * kv_bytes_per_token_and_layer(config)
    return layers * (layer_bytes(config) + kv) + embedding_bytes(config)


# What nvidia-smi says of an RTX 4090, an A6000, an H100 and an H200, in MiB.
@pytest.mark.parametrize(
    ("memory_mib", "layers"),
    [(24564, 10), (49140, 24), (81559, 41), (143771, 48)],
    ids=["24 GB", "48 GB", "80 GB", "141 GB"],
)
def test_the_whole_cache_fits_each_usual_card(memory_mib, layers):
    memory_bytes = memory_mib * 2**20
    fit = fit_shape(memory_bytes, QWEN, BLOCKS, BLOCK_TOKENS)
    assert (fit.layers, fit.num_blocks) == (layers, BLOCKS)
    used = needed_bytes(QWEN, layers, BLOCKS)
    assert used <= usable_bytes(memory_bytes) < memory_bytes
    if layers < QWEN["num_hidden_layers"]:
        assert needed_bytes(QWEN, layers + 1, BLOCKS) > usable_bytes(memory_bytes)


def test_the_weights_are_those_of_the_models_own_card():
    weights = 48 * layer_bytes(QWEN) + embedding_bytes(QWEN)
    assert weights / 2 == pytest.approx(30.5e9, rel=0.002)  # Parameters.
    dense = 16 * layer_bytes(DENSE) + embedding_bytes(DENSE)
    assert dense / 2 == pytest.approx(1.236e9, rel=0.002)  # Llama 3.2 1B.


def test_a_card_without_room_for_a_layer_is_refused():
    with pytest.raises(DoesNotFit, match="4 GiB of GPU memory"):
        fit_shape(4 * GIB, QWEN, BLOCKS, BLOCK_TOKENS)


def test_real_weights_are_served_whole_with_the_blocks_that_are_left():
    weights = 61 * 10**9
    whole = fit_weights(141 * 10**9, weights, QWEN, BLOCKS, BLOCK_TOKENS)
    assert (whole.layers, whole.num_blocks) == (48, BLOCKS)
    less = fit_weights(81559 * 2**20, weights, QWEN, BLOCKS, BLOCK_TOKENS)
    assert less.layers == 48
    assert LEAST_BLOCKS <= less.num_blocks < BLOCKS


def test_real_weights_that_leave_no_room_for_a_cache_are_refused():
    with pytest.raises(DoesNotFit, match="serve a smaller model"):
        fit_weights(48 * 10**9, 61 * 10**9, QWEN, BLOCKS, BLOCK_TOKENS)


@given(st.integers(4 * GIB, 300 * GIB), st.sampled_from([QWEN, DENSE]))
def test_more_memory_never_holds_less_and_nothing_is_served_that_does_not_fit(
    memory_bytes, config
):
    try:
        fit = fit_shape(memory_bytes, config, BLOCKS, BLOCK_TOKENS)
    except DoesNotFit:
        return
    assert needed_bytes(config, fit.layers, fit.num_blocks) <= usable_bytes(
        memory_bytes
    )
    more = fit_shape(memory_bytes + GIB, config, BLOCKS, BLOCK_TOKENS)
    assert more.layers >= fit.layers
