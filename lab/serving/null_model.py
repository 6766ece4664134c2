# SPDX-License-Identifier: Apache-2.0
"""The checkpoint folder that vLLM is pointed at: a config.json, and no weights."""

from __future__ import annotations

import json
from pathlib import Path

from lab.config import ConfigError
from lab.paths import CONFIGS
from microbench.profile import Profile

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


def write_model(folder: Path, profile: Profile) -> tuple[Path, int]:
    """The model's folder and vocabulary size, made in `folder` where need be.

    The null model where the profile says so; else the weights the user named, or the
    shape configs/models/<profile.model>.json, to be loaded with dummy weights.
    Raises ConfigError if a named model has no config.json.
    """
    if profile.null_model:
        cost = {"forward_us": profile.forward_us}
        return write_null_model(folder, profile.max_model_len, cost)
    shape = CONFIGS / "models" / f"{profile.model}.json"
    given = Path(str(profile.model))
    file = shape if shape.exists() else given / "config.json"
    if not file.exists():
        raise ConfigError(f"model {profile.model!r}: there is no {file}")
    config = json.loads(file.read_text())
    if file != shape:
        return given.resolve(), config["vocab_size"]
    return _write(folder, config)


def write_null_model(
    folder: Path, max_model_len: int, cost: dict[str, float]
) -> tuple[Path, int]:
    """The null model's folder and vocabulary size.

    `cost`: the simulated time of a forward, see
    lab/serving/vllm_plugin/kvtax_null_model/model.py.
    """
    simulated = {f"null_{name}": value for name, value in cost.items()}
    length = {"max_position_embeddings": max_model_len}
    return _write(folder, NULL_MODEL | length | simulated)


def _write(folder: Path, config: dict) -> tuple[Path, int]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder, config["vocab_size"]
