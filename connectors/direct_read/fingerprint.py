# SPDX-License-Identifier: Apache-2.0
"""What two instances must have in common to read each other's KV cache.

Equal block hashes mean equal tokens, LoRA name and cache salt; that the bytes behind
them mean the same, and lie in memory the same way, is what a fingerprint is for. All
in it was given at start: weights that are changed at run time are not seen.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def of(
    vllm_config: VllmConfig, kv_cache_spec_summary: dict[str, str]
) -> dict[str, str]:
    """An instance's fingerprint: name and value of each thing that must be equal.

    `kv_cache_spec_summary` is what only the KV cache itself tells: number of groups,
    their spec, layout. Call it once the scheduler has initialised NONE_HASH.
    Raises ValueError, with what to change, where blocks cannot be relied on to hold
    what their hash says, or to stay where they are.
    """
    import vllm
    from vllm.v1.core import kv_cache_utils

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    if reason := _refusal(vllm_config):
        raise ValueError(f"DirectReadConnector: {reason}")
    values = {
        "vllm": vllm.__version__,
        "model": model.model,
        "revision": model.revision,
        # With hf_overrides in it: RoPE scaling, say, changes every key.
        "hf_config": _digest(
            json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str).encode()
        ),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        # A digest, as who has NONE_HASH can make hashes of guessed prompts.
        "NONE_HASH": _digest(kv_cache_utils.NONE_HASH),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
    }
    summary = {
        f"kv_cache.{name}": value for name, value in kv_cache_spec_summary.items()
    }
    return {name: str(value) for name, value in values.items()} | summary


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """What differs, in words that name it and both values; None if nothing does."""
    differing = [
        f"{name} is {ours.get(name, 'not given')} here and "
        f"{theirs.get(name, 'not given')} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if any(text.startswith("NONE_HASH") for text in differing):
        differing.append("NONE_HASH comes of PYTHONHASHSEED: set it to the same value")
    return "; ".join(differing) or None


def _refusal(vllm_config: VllmConfig) -> str | None:
    if vllm_config.cache_config.calculate_kv_scales:
        return (
            "set calculate_kv_scales to false: each instance would have KV scales of "
            "its own"
        )
    if vllm_config.scheduler_config.policy != "fcfs":
        return (
            'set scheduling_policy to "fcfs": with others vLLM caches blocks of '
            "requests that it preempts in the same step, and never computes them"
        )
    if vllm_config.speculative_config is not None:
        return (
            "set no speculative_config: a draft's KV may be written after the step's "
            "output is there"
        )
    if vllm_config.model_config.enable_sleep_mode:
        return "set enable_sleep_mode to false: peers have addresses of the KV cache"
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(b"direct read fingerprint" + data).hexdigest()[:16]
