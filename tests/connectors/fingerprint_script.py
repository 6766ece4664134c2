# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of vLLM's own configs: `fingerprint_script.py RESULT MODEL OTHER_PATH`.

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

BASE = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "block_size": 16,
    "served_model_name": "served",
}


def fingerprint_of(model: str, seed: str = "0", **arguments) -> dict[str, str]:
    os.environ["PYTHONHASHSEED"] = seed
    kv_cache_utils.init_none_hash(sha256_cbor)
    config = EngineArgs(model=model, **BASE | arguments).create_engine_config()
    return fingerprint.of(config, {"spec": "full"})


def main() -> None:
    result, model, other_path = sys.argv[1:]
    ours = fingerprint_of(model)
    theirs = {
        "nothing": fingerprint_of(other_path, gpu_memory_utilization=0.5),
        "NONE_HASH": fingerprint_of(model, seed="1"),
        "served_model_name": fingerprint_of(model, served_model_name=["other", "a"]),
        "revision": fingerprint_of(model, revision="other"),
        "dtype": fingerprint_of(model, dtype="float32"),
        "block_size": fingerprint_of(model, block_size=32),
        "cache_dtype": fingerprint_of(model, kv_cache_dtype="float16"),
        "prefix_caching_hash_algo": fingerprint_of(
            model, prefix_caching_hash_algo="sha256_cbor"
        ),
        "hf_config": fingerprint_of(model, hf_overrides={"rope_theta": 5.0}),
    }
    found = {
        "ours": ours,
        "NONE_HASH": kv_cache_utils.NONE_HASH.hex(),
        "differences": {
            name: fingerprint.difference(ours, other) for name, other in theirs.items()
        },
    }
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
