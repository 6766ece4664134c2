# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of vLLM's own configs: `fingerprint_script.py RESULT MODEL OTHER_MODEL`.

Started by test_fingerprint.py.
"""

import json
import os
import sys
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from connectors.direct_read import fingerprint

BASE = {"skip_tokenizer_init": True, "load_format": "dummy", "block_size": 16}


def fingerprint_of(model: str, seed: str = "0", **arguments) -> dict[str, str]:
    os.environ["PYTHONHASHSEED"] = seed
    kv_cache_utils.init_none_hash(sha256_cbor)
    config = EngineArgs(model=model, **BASE | arguments).create_engine_config()
    return fingerprint.of(config, {"spec": "full"})


def refusal(model: str, change) -> str | None:
    config = EngineArgs(model=model, **BASE).create_engine_config()
    change(config)
    try:
        fingerprint.of(config, {})
    except ValueError as error:
        return str(error)
    return None


def main() -> None:
    result, model, other_model = sys.argv[1:]
    ours = fingerprint_of(model)
    theirs = {
        "nothing": fingerprint_of(model, gpu_memory_utilization=0.5),
        "NONE_HASH": fingerprint_of(model, seed="1"),
        "model": fingerprint_of(other_model),
        "revision": fingerprint_of(model, revision="other"),
        "dtype": fingerprint_of(model, dtype="float32"),
        "block_size": fingerprint_of(model, block_size=32),
        "cache_dtype": fingerprint_of(model, kv_cache_dtype="float16"),
        "prefix_caching_hash_algo": fingerprint_of(
            model, prefix_caching_hash_algo="sha256_cbor"
        ),
        "hf_config": fingerprint_of(model, hf_overrides={"rope_theta": 5.0}),
    }
    changes = {
        "calculate_kv_scales": lambda c: setattr(
            c.cache_config, "calculate_kv_scales", True
        ),
        "scheduling_policy": lambda c: setattr(
            c.scheduler_config, "policy", "priority"
        ),
        "speculative_config": lambda c: setattr(c, "speculative_config", object()),
        "enable_sleep_mode": lambda c: setattr(
            c.model_config, "enable_sleep_mode", True
        ),
    }
    found = {
        "ours": ours,
        "NONE_HASH": kv_cache_utils.NONE_HASH.hex(),
        "differences": {
            name: fingerprint.difference(ours, other) for name, other in theirs.items()
        },
        "refusals": {name: refusal(model, change) for name, change in changes.items()},
    }
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
