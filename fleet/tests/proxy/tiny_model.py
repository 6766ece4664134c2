# SPDX-License-Identifier: Apache-2.0
"""A model's folder with a tokenizer of 1000 tokens and a chat template; no weights."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from kvtax.paths import REPOSITORY
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "vocab_size": 1024,
}
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|im|>", "<tool>", "</tool>"]

# After Qwen2.5's: one text per message.
CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}
{%- if message.reasoning_content %}
<think>{{ message.reasoning_content }}</think>{% endif %}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}
{%- if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"""


def tiny_model(folder: Path) -> Path:
    """The folder, with a config.json and a tokenizer trained on the root's README."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(each, normalized=False) for each in SPECIAL],
        show_progress=False,
    )
    tokenizer.train([str(REPOSITORY / "README.md")], trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|im_end|>"
    )
    whole.chat_template = CHATML
    whole.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
