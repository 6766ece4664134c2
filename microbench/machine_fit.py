# SPDX-License-Identifier: Apache-2.0
"""Fit a profile to this machine and its GPU, and check that a sweep would start."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtax.config import ConfigError
from kvtax.engine import ServerError, preflight
from kvtax.engine.gpus import USABLE_SHARE, NoGpu, has_rdma, visible_gpus
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import find_model
from kvtax.engine.preflight import PreflightError
from microbench.profile import Profile
from microbench.specs import build_overlays


def fitted(profile: Profile) -> Profile:
    """Set the layers, blocks and Mooncake protocol of `profile` for this machine.

    A CPU profile, and any profile on a machine without a GPU, keeps its layers.
    Raises PreflightError if it does not fit, ConfigError if there is no such model.
    """
    if profile.flavour != "gpu":
        return profile
    protocol = profile.mooncake_protocol
    if protocol == "auto":
        protocol = "rdma" if has_rdma() else "tcp"
    try:
        gpu = visible_gpus()[0]
    except NoGpu:  # The preflight says so.
        return msgspec.structs.replace(profile, mooncake_protocol=protocol)
    try:
        fit = _fit(profile, gpu.memory_mib * 2**20)
    except DoesNotFit as error:
        raise PreflightError(f"{gpu.name}: {error}") from None
    return msgspec.structs.replace(
        profile,
        mooncake_protocol=protocol,
        layers=fit.layers,
        num_blocks=fit.num_blocks,
    )


def _fit(profile: Profile, memory_bytes: int) -> Fit:
    file = find_model(profile.model)
    config = json.loads(file.read_text())
    cache = config, profile.num_blocks, profile.block_size
    weights = [part.stat().st_size for part in file.parent.glob("*.safetensors")]
    if weights:
        return fit_weights(memory_bytes, sum(weights), *cache)
    return fit_shape(memory_bytes, *cache)


def choices(profile: Profile) -> list[str]:
    """Describe the choices of `fitted`."""
    if profile.layers is None:
        return []
    chosen = [
        f"{profile.model}: {profile.layers} layers and {profile.num_blocks} blocks of "
        f"{profile.block_size} tokens fit this GPU"
    ]
    if profile.mooncake_protocol == "tcp":
        chosen.append(
            "Mooncake over TCP: no RDMA port is up here. Instances with GPUs normally "
            "transfer by RDMA"
        )
    return chosen


def check(profile: Profile, installed: Installation) -> bool:
    """Print all reasons against a sweep of `profile`; return whether there are none."""
    problems = []
    try:
        profile = fitted(profile)
    except (ConfigError, PreflightError) as error:
        problems.append(str(error))
    problems += reasons(profile, installed)
    for choice in choices(profile):
        print(f"sweep: {choice}")
    if not problems:
        print(f"sweep: profile {profile.name} can be measured here")
        return True
    print(f"sweep: profile {profile.name} cannot be measured here:", file=sys.stderr)
    for reason in dict.fromkeys(problems):
        print("  - " + reason.replace("\n", "\n    "), file=sys.stderr)
    return False


def reasons(profile: Profile, installed: Installation) -> Iterator[str]:
    """Yield each reason that would stop a sweep, or one of its configs."""
    yield from preflight.resource_problems(profile, installed=installed)
    with tempfile.TemporaryDirectory(prefix="kvtax-check-") as scratch:
        folder = Path(scratch)
        try:
            profile.checkpoint(folder / "model")
        except ConfigError as error:
            yield str(error)
        try:
            preflight.check_import(folder, profile, installed)
        except ModuleNotFoundError:
            # resource_problems has reported a missing vLLM.
            return
        except ServerError:
            pass
        except PreflightError as error:
            yield str(error)
        _, errors = build_overlays(folder, profile.connectors(), installed)
        for reason in dict.fromkeys(errors.values()):
            names = ", ".join(name for name in errors if errors[name] == reason)
            yield f"{names}: {reason}"


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


def fit_shape(
    memory_bytes: int, config: dict[str, Any], num_blocks: int, block_size: int
) -> Fit:
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
    config: dict[str, Any],
    num_blocks: int,
    block_size: int,
) -> Fit:
    """Fit all layers of a model with real weights, and at most `num_blocks` of KV.

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


def kv_bytes_per_token_and_layer(config: dict[str, Any]) -> int:
    """Keys and values of all KV heads."""
    heads: int = config["num_key_value_heads"]
    return 2 * heads * head_values(config) * BYTES_PER_VALUE


def layer_bytes(config: dict[str, Any]) -> int:
    """Weights of one layer: attention, and the MLP or all experts with their router."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    attention = 2 * hidden * heads * head_values(config)
    if experts := config.get("num_experts"):
        mlp = experts * (3 * hidden * config["moe_intermediate_size"] + hidden)
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    return int((attention + mlp) * BYTES_PER_VALUE)


def embedding_bytes(config: dict[str, Any]) -> int:
    """Weights outside of the layers: the embedding, and the head if it is another."""
    tables = 1 if config.get("tie_word_embeddings") else 2
    values = config["vocab_size"] * config["hidden_size"]
    return int(tables * values * BYTES_PER_VALUE)


def head_values(config: dict[str, Any]) -> int:
    """Values per attention head."""
    computed = config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim") or computed)
