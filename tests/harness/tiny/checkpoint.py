# SPDX-License-Identifier: Apache-2.0
"""A tiny real checkpoint: random weights, yet every greedy token hangs on the prompt.

A transfer that loses or mixes up KV can only show in the tokens if these depend on
it. Two things see to that: query and key norms of SHARPNESS give attention scores a
spread of SHARPNESS squared, so that each head picks a few tokens out of thousands
rather than their mean, and a prompt token has nothing but attention to be heard by.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 512
MAX_TOKENS = 8192
SHARPNESS = 2.0

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_TOKENS,
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **SIZES,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    # Rounding differs between a prefill and a decode; float32 keeps it below the gap
    # between the best two tokens.
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_checkpoint(folder: Path, seed: int) -> Path:
    """`folder` with config.json and model.safetensors; the seed decides the weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids, uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (tokens,), generator=generator).tolist()


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Rows of unit expected norm: what comes in with unit variance leaves with it.
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    head = SIZES["head_dim"]
    queries = SIZES["num_attention_heads"] * head
    keys = SIZES["num_key_value_heads"] * head
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB_SIZE, hidden),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        in_layer = {
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
            "self_attn.q_proj.weight": matrix(queries, hidden),
            "self_attn.k_proj.weight": matrix(keys, hidden),
            "self_attn.v_proj.weight": matrix(keys, hidden),
            "self_attn.o_proj.weight": matrix(hidden, queries) * 2,
            "self_attn.q_norm.weight": torch.full((head,), SHARPNESS),
            "self_attn.k_norm.weight": torch.full((head,), SHARPNESS),
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
        weights |= {f"model.layers.{layer}.{name}": w for name, w in in_layer.items()}
    return weights
