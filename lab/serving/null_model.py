# SPDX-License-Identifier: Apache-2.0
"""The checkpoint folder that vLLM is pointed at: a config.json, and no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lab.config import ConfigError
from lab.paths import CONFIGS
from lab.serving.settings import CPU_ENGINE, Forward

# One attention layer, so that KV blocks exist; what it computes is never asked for.
NULL_MODEL = {
    "architectures": ["NullForCausalLM"],
    # Any type that transformers knows: vLLM goes by the architecture.
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder, and how many token ids it knows."""

    folder: Path
    vocab_size: int


def write_null_model(folder: Path, max_model_len: int, forward: Forward) -> Checkpoint:
    """The null model, made in `folder`; vllm_plugin/ reads what a forward takes."""
    simulated = {
        f"null_{name}": value
        for name, value in msgspec.structs.asdict(forward).items()
        if value or name == "forward_us"
    }
    length = {"max_position_embeddings": max_model_len}
    return _write(folder, NULL_MODEL | length | simulated)


def null_checkpoint(folder: Path) -> Path:
    """The null model's folder, for CPU_ENGINE, with a forward that takes no time."""
    return write_null_model(folder, CPU_ENGINE.max_model_len, Forward(0)).folder


def real_model(folder: Path, name: str | None) -> Checkpoint:
    """The checkpoint folder `name`, or a shape of configs/models/ made in `folder`.

    A shape is loaded with dummy weights. Raises ConfigError if there is no such model.
    """
    shape = CONFIGS / "models" / f"{name}.json"
    given = Path(str(name))
    file = shape if shape.exists() else given / "config.json"
    if not file.exists():
        raise ConfigError(f"model {name!r}: there is no {file}")
    config = json.loads(file.read_text())
    if file != shape:
        return Checkpoint(given.resolve(), config["vocab_size"])
    return _write(folder, config)


def _write(folder: Path, config: dict) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return Checkpoint(folder, config["vocab_size"])
