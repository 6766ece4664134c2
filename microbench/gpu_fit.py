# SPDX-License-Identifier: Apache-2.0
"""Compute how much of a model and of a KV cache fits on a GPU.

The cache comes first, since a sweep is about its size. Of a shape with dummy weights,
as many layers are served as leave room for all blocks. Real weights are served whole,
with as many blocks as they leave room for.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtax.engine.gpus import USABLE_SHARE

# Activations of 8,192 tokens, CUDA's context and graphs: an estimate. A 4B shape took
# 1.1 GiB on an H100 (studies/gpu); wider ones take more.
RESERVE_BYTES = 3 * 2**30
BYTES_PER_VALUE = 2  # bfloat16
# A slope per 1,000 blocks needs some thousands of them.
LEAST_BLOCKS = 4000


class DoesNotFit(Exception):
    """The GPU is too small; the message says for what."""


@dataclass(frozen=True)
class Fit:
    """Size of what is served: layers of the model, blocks of KV cache."""

    layers: int
    num_blocks: int


def fit_shape(memory_bytes: int, config: dict, num_blocks: int, block_size: int) -> Fit:
    """Compute how many layers with dummy weights fit beside all blocks.

    `config` is the model's config.json, dense or a mixture of experts, with
    grouped-query attention. Raises DoesNotFit.
    """
    per_layer = layer_bytes(config)
    per_layer += num_blocks * block_size * kv_bytes_per_token_and_layer(config)
    room = usable_bytes(memory_bytes) - embedding_bytes(config)
    layers = min(config["num_hidden_layers"], room // per_layer)
    if layers < 1:
        raise DoesNotFit(
            f"{memory_bytes / 2**30:.0f} GiB of GPU memory hold not one layer of the "
            f"model beside {num_blocks} blocks of KV cache"
        )
    return Fit(layers, num_blocks)


def fit_weights(
    memory_bytes: int,
    weight_bytes: int,
    config: dict,
    num_blocks: int,
    block_size: int,
) -> Fit:
    """All layers of a model with real weights, and at most `num_blocks` of KV cache.

    Raises DoesNotFit if fewer than LEAST_BLOCKS are left.
    """
    layers = config["num_hidden_layers"]
    per_block = layers * block_size * kv_bytes_per_token_and_layer(config)
    room = usable_bytes(memory_bytes) - weight_bytes
    fitting = min(num_blocks, room // per_block)
    if fitting < LEAST_BLOCKS:
        raise DoesNotFit(
            f"{memory_bytes / 2**30:.0f} GiB of GPU memory hold {max(fitting, 0)} "
            f"blocks of KV cache beside the model's {weight_bytes / 2**30:.0f} GiB of "
            f"weights, and {LEAST_BLOCKS} are needed: serve a smaller model"
        )
    return Fit(layers, fitting)


def usable_bytes(memory_bytes: int) -> int:
    """Compute the memory that weights and KV cache can have together."""
    return int(memory_bytes * USABLE_SHARE) - RESERVE_BYTES


def kv_bytes_per_token_and_layer(config: dict) -> int:
    """Keys and values of all KV heads."""
    return 2 * config["num_key_value_heads"] * head_values(config) * BYTES_PER_VALUE


def layer_bytes(config: dict) -> int:
    """Weights of one layer: attention, and the MLP or all experts with their router."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    attention = 2 * hidden * heads * head_values(config)
    if experts := config.get("num_experts"):
        mlp = experts * (3 * hidden * config["moe_intermediate_size"] + hidden)
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    return (attention + mlp) * BYTES_PER_VALUE


def embedding_bytes(config: dict) -> int:
    """Weights outside of the layers: the embedding, and the head if it is another."""
    tables = 1 if config.get("tie_word_embeddings") else 2
    return tables * config["vocab_size"] * config["hidden_size"] * BYTES_PER_VALUE


def head_values(config: dict) -> int:
    """Values per attention head."""
    computed = config["hidden_size"] // config["num_attention_heads"]
    return config.get("head_dim") or computed
