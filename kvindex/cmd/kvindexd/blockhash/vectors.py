# SPDX-License-Identifier: Apache-2.0
"""Makes testdata/vectors.json: block hashes as each release of vLLM computes them.

    pip install --target FOLDER xxhash
    PYTHONPATH=FOLDER python -m kvindex.cmd.kvindexd.blockhash.vectors

The functions are the release's own: vllm/utils/hashing.py, and what makes a request's
block hashes in vllm/v1/core/kv_cache_utils.py, cut out as the module itself would
import all of vLLM.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtax.patcher.patch import load_releases
from kvtax.paths import CONFIGS, REPOSITORY

FILE = Path(__file__).parent / "testdata" / "vectors.json"
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEEDS = ("0", "vllm-none-hash")
BLOCK_TOKENS = 4
FUNCTIONS = re.compile(
    "_gen_.*_extra_hash_keys|generate_block_hash_extra_keys|need_extra_keys"
    "|hash_block_tokens|get_request_block_hasher"
)


def releases() -> dict[str, Path]:
    """Return the fetched vllm folder of each release in configs/releases.toml."""
    listed = load_releases(CONFIGS / "releases.toml")["vllm"]
    folder = REPOSITORY / "third_party"
    return {r.version: folder / f"vllm-{r.version}" / "vllm" for r in listed}


def hashing_of(vllm: Path) -> Any:
    """Load the release's vllm/utils/hashing.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "hashing", vllm / "utils" / "hashing.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions_of(vllm: Path) -> dict[str, Any]:
    """Return vLLM's block hasher; the caller sets NONE_HASH."""
    tree = ast.parse((vllm / "v1" / "core" / "kv_cache_utils.py").read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and FUNCTIONS.fullmatch(node.name)
    ]
    for node in tree.body:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign):
                inner.annotation = ast.Constant(None)
            elif isinstance(inner, ast.FunctionDef):
                inner.returns = None
                inner.args.args[0].annotation = None
    scope: dict[str, Any] = {"BlockHash": bytes, "hashlib": hashlib}
    exec(compile(ast.fix_missing_locations(tree), vllm, "exec"), scope)
    return scope


def prompts() -> Iterator[dict[str, Any]]:
    """Token ids of every width, and each thing beside them that counts."""
    wide = [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
    yield {"ids": wide}
    yield {"ids": list(range(4)), "salt": "s"}
    yield {"ids": wide, "salt": "a longer salt, of Zürich"}
    yield {"ids": wide, "lora": "adapter", "lora_path": "/models/adapter"}
    image = {"id": "3f" * 32, "offset": 1, "tokens": 5}
    yield {"ids": wide, "images": [image]}
    two = [image | {"tokens": 1}, image | {"id": "a", "offset": 3, "tokens": 2}]
    yield {"ids": wide * 2, "images": two}
    everything = {"lora": "l" * 300, "lora_path": "p", "salt": "p"}
    yield {"ids": wide * 3, "images": two} | everything


def hashes(functions: dict[str, Any], fn: Callable, prompt: dict) -> list[str]:
    """Return the block hashes of a prompt, in hex."""
    lora = None
    if "lora" in prompt:
        lora = SimpleNamespace(
            lora_name=prompt["lora"], lora_path=prompt["lora_path"], name=prompt["lora"]
        )
    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(prompt["ids"]),
        all_token_ids=prompt["ids"],
        lora_request=lora,
        cache_salt=prompt.get("salt"),
        prompt_embeds=None,
        mm_features=[
            SimpleNamespace(
                identifier=image["id"],
                mm_position=SimpleNamespace(
                    offset=image["offset"], length=image["tokens"]
                ),
            )
            for image in prompt.get("images", [])
        ],
    )
    hasher = functions["get_request_block_hasher"](BLOCK_TOKENS, fn)
    return [one.hex() for one in hasher(request)]


def vectors(vllm: Path) -> Iterator[dict[str, Any]]:
    hashing, functions = hashing_of(vllm), functions_of(vllm)
    for algorithm in ALGORITHMS:
        fn = hashing.get_hash_fn_by_name(algorithm)
        for seed in SEEDS:
            none_hash = functions["NONE_HASH"] = fn(seed)
            made = [
                {"prompt": n, "hashes": hashes(functions, fn, prompt)}
                for n, prompt in enumerate(prompts())
            ]
            yield {
                "algorithm": algorithm,
                "seed": seed,
                "none_hash": none_hash.hex(),
                "made": made,
            }


def document() -> str:
    """Return the content of testdata/vectors.json."""
    made = {release: list(vectors(path)) for release, path in releases().items()}
    whole = {"block_tokens": BLOCK_TOKENS, "prompts": list(prompts()), "made": made}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(document())
