# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face cache with stand-ins for the models that upstream's tests name.

Most of the tests want a model's config and now and then its tokenizer, never its
weights. The shapes are the public ones; the vocabulary is made up. Tests that want
weights fail without a net.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REVISION = "0" * 40
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<image>"]
VOCABULARY = SPECIAL + [f"word{number}" for number in range(1000)]

# Fields of config.json that are not the defaults of the model type in transformers.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "torch_dtype": "float16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
}
QWEN1_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151643,
    "intermediate_size": 11008,
    "rope_theta": 1000000.0,
}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "torch_dtype": "float16",
    "image_token_index": SPECIAL.index("<image>"),
    "pad_token_id": SPECIAL.index("<pad>"),
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
}
LLAVA_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "processor_class": "LlavaProcessor",
}
LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL)
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(VOCABULARY)},
        "unk_token": "<unk>",
    },
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "</s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "model_max_length": 2048,
}

TOKENIZER_FILES: dict[str, Any] = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": TOKENIZER_CONFIG,
}
MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": {"config.json": OPT},
    "Qwen/Qwen3-0.6B": {"config.json": QWEN3},
    "Qwen/Qwen1.5-7B": {"config.json": QWEN1_5},
    "llava-hf/llava-1.5-7b-hf": {
        "config.json": LLAVA,
        "preprocessor_config.json": LLAVA_IMAGES,
        "processor_config.json": LLAVA_PROCESSOR,
    },
}


def write_model_cache(home: Path) -> None:
    """Fill `home`, a folder for HF_HOME."""
    for name, files in MODELS.items():
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(REVISION)
        for path, content in (files | TOKENIZER_FILES).items():
            (snapshot / path).write_text(json.dumps(content))
