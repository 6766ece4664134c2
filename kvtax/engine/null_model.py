# SPDX-License-Identifier: Apache-2.0
"""The null model: its folder without weights, and the time of its forwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvtax.config import ConfigError
from kvtax.paths import CONFIGS
from kvtax.records.files import write_whole
from kvtax.records.profile import EngineSettings

Time = Annotated[float, msgspec.Meta(ge=0)]


class Forward(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Time of a forward of the null model.

    The device takes `forward_us`, plus `us_per_token` for each token of its batch, plus
    `us_per_context_token` for each token that those attend to, plus `us_per_kv_token`
    for each token of KV that is read: those before the step, once a request. The host
    takes `launch_us` to launch it meanwhile; the longer of the two counts.
    """

    forward_us: Time
    us_per_token: Time = 0
    us_per_context_token: Time = 0
    us_per_kv_token: Time = 0
    launch_us: Time = 0


# All hooks around connector methods run, and the methods themselves do nothing.
NOOP = {
    "kv_connector": "NoopConnector",
    "kv_connector_module_path": "connectors.noop",
    "kv_role": "kv_both",
}
# Engine settings of tests and benchmarks.
CPU_ENGINE = EngineSettings(
    flavour="cpu",
    num_blocks=12_000,
    block_size=16,
    max_model_len=8192,
    max_num_batched_tokens=8192,
    max_num_seqs=64,
    server_args=["--enforce-eager"],
    server_env={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The random sampler alone would go through torch.compile: seconds per step.
        "TORCHDYNAMO_DISABLE": "1",
    },
    kv_transfer_config={"kv_buffer_device": "cpu"},
)


# As many attention layers as Qwen3-Coder-30B-A3B has, for the connector's calls per
# layer. Only the first has a KV cache, so that it stays small.
NULL_MODEL = {
    "architectures": ["NullForCausalLM"],
    # Any type that transformers knows: vLLM goes by the architecture.
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 48,
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
    """Make the null model in `folder`; vllm_plugin/ reads what a forward takes."""
    simulated = {
        f"null_{name}": value
        for name, value in msgspec.structs.asdict(forward).items()
        if value or name == "forward_us"
    }
    length = {"max_position_embeddings": max_model_len}
    return _write(folder, NULL_MODEL | length | simulated)


def null_checkpoint(folder: Path) -> Path:
    """Make the null model's folder, for CPU_ENGINE; its forward takes no time."""
    return write_null_model(folder, CPU_ENGINE.max_model_len, Forward(0)).folder


def real_model(folder: Path, name: str | None, layers: int | None = None) -> Checkpoint:
    """Find the checkpoint folder `name`, or make a shape of configs/models/.

    What has no weights is served with dummies, and with as many `layers` as given.
    Raises ConfigError if there is no such model.
    """
    file = find_model(name)
    config = json.loads(file.read_text())
    given = file.parent
    if given != CONFIGS / "models" and (layers is None or has_weights(given)):
        return Checkpoint(given.resolve(), config["vocab_size"])
    return _write(folder, config | ({"num_hidden_layers": layers} if layers else {}))


def find_model(name: str | None) -> Path:
    """Return the file with the shape of the model `name`, as in vLLM's config.json.

    Raises ConfigError if there is no such model.
    """
    shape = CONFIGS / "models" / f"{name}.json"
    file = shape if shape.exists() else Path(str(name)) / "config.json"
    if not file.exists():
        raise ConfigError(f"model {name!r}: there is no {file}")
    return file


def has_weights(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` has weights; else they are dummies."""
    return any(folder.glob("*.safetensors"))


def _write(folder: Path, config: dict[str, Any]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    # A server that starts now may be reading it.
    write_whole(folder / "config.json", json.dumps(config, indent=1).encode())
    return Checkpoint(folder, config["vocab_size"])
