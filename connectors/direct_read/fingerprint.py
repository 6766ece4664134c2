# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of the properties that two instances must share to read each other.

Equal block hashes mean equal tokens, LoRA name and cache salt. A fingerprint makes sure
that the bytes behind them mean the same, and have the same layout in memory. It does
not look at weights: it takes models with the same served name to have the same weights.
What can change while an instance runs, its weights and its prefix cache, is counted;
the counts are compared with each offer (protocol.Offer).
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Where a model's config was found: this differs between hosts.
PLACES = {"_name_or_path", "_commit_hash"}


def of(
    vllm_config: VllmConfig, kv_cache_spec_summary: dict[str, str]
) -> dict[str, str]:
    """Return an instance's fingerprint: name and value of each property.

    `kv_cache_spec_summary` is what only the KV cache itself can tell: number of groups,
    their spec, layout. Call it once the scheduler has initialised NONE_HASH.
    """
    import vllm
    from vllm.v1.core import kv_cache_utils

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    values = {
        "vllm": vllm.__version__,
        # Not the path, which may differ and should not be given away.
        "served_model_name": model.served_model_name,
        "revision": model.revision,
        # With hf_overrides in it: RoPE scaling, say, changes every key.
        "hf_config": _digest(
            json.dumps(
                _without_places(model.hf_config.to_dict()), sort_keys=True, default=str
            ).encode()
        ),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        # A digest: with NONE_HASH itself one could make the hashes of guessed prompts.
        "NONE_HASH": _digest(kv_cache_utils.NONE_HASH),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
    }
    summary = {
        f"kv_cache.{name}": value for name, value in kv_cache_spec_summary.items()
    }
    return {name: str(value) for name, value in values.items()} | summary


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Describe each difference with both values; return None if there is none."""
    differing = [
        f"{name} is {ours.get(name, 'not given')} here and "
        f"{theirs.get(name, 'not given')} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if any(text.startswith("NONE_HASH") for text in differing):
        differing.append(
            "NONE_HASH comes from PYTHONHASHSEED: set it to the same value"
        )
    return "; ".join(differing) or None


def _without_places(config: object) -> object:
    if isinstance(config, dict):
        return {
            name: _without_places(value)
            for name, value in config.items()
            if name not in PLACES
        }
    if isinstance(config, list):
        return [_without_places(value) for value in config]
    return config


def _digest(data: bytes) -> str:
    return hashlib.sha256(b"direct read fingerprint" + data).hexdigest()[:16]
