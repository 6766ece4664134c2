# SPDX-License-Identifier: Apache-2.0
"""Makes testdata/messages.json: KV events as each release of vLLM encodes them.

    python -m kvindex.cmd.kvindexd.events.messages

The structs are the release's own, cut out of vllm/distributed/kv_events.py: the module
itself would import all of vLLM.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtax.patcher.patch import load_releases
from kvtax.paths import CONFIGS, REPOSITORY

FILE = Path(__file__).parent / "testdata" / "messages.json"
STRUCTS = (
    "EventBatch",
    "KVCacheEvent",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "KVEventBatch",
)
# vllm/v1/core/kv_cache_utils.py: bytes, or their last 8 as a number.
ExternalBlockHash = bytes | int


def releases() -> dict[str, Path]:
    """Return the kv_events.py of each release, fetched or not, oldest first."""
    listed = load_releases(CONFIGS / "releases.toml")["vllm"]
    file = Path("vllm", "distributed", "kv_events.py")
    return {
        r.version: REPOSITORY / "third_party" / f"vllm-{r.version}" / file
        for r in listed
    }


def structs_of(path: Path) -> dict[str, Any]:
    """Return the event structs that a kv_events.py defines, by name."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in STRUCTS
    ]
    scope = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": ExternalBlockHash}
    exec(compile(tree, path, "exec"), scope)
    return {name: scope[name] for name in STRUCTS}


def samples() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Events by what they are, as (struct, fields that every release has).

    Token ids and hashes take every width that msgpack has for them.
    """
    wide = [0, 127, 128, 255, 256, 65535, 65536, 2**31 - 1]
    stored = {"lora_id": None, "medium": "GPU", "lora_name": None}
    root = {**stored, "parent_block_hash": None, "block_size": 4}
    child = {**root, "parent_block_hash": bytes(range(32))}
    first = {"block_hashes": [b"\xff" * 32, b"\0" * 32], "token_ids": wide}
    yield "a prompt's first blocks", [("BlockStored", root | first)]
    many = {"block_hashes": [bytes([n] * 16) for n in range(20)]}
    many["token_ids"] = list(range(1000, 1080))
    yield "twenty more", [("BlockStored", child | many)]
    numbers = {"block_hashes": [1, 2**64 - 1], "parent_block_hash": 2**63}
    yield "hashes as numbers", [("BlockStored", child | numbers | {"token_ids": wide})]
    salted = first | {"extra_keys": [("salt",), None]}
    yield "a cache salt", [("BlockStored", root | salted)]
    lora = first | {"lora_id": 7, "lora_name": "adapter"}
    lora["extra_keys"] = [("adapter", "salt"), ("adapter", ("image", -2), b"\1\2")]
    yield "a LoRA, an image and embeddings", [("BlockStored", root | lora)]
    offloaded = {**root, "block_hashes": [b"\7" * 32], "token_ids": []}
    yield "an offloaded block", [("BlockStored", offloaded | {"medium": "CPU"})]
    removed = {"block_hashes": [b"\7" * 32, 9], "medium": "GPU"}
    yield (
        "one of each",
        [
            ("BlockRemoved", removed),
            ("AllBlocksCleared", {}),
            ("BlockStored", root | first),
        ],
    )
    yield "nothing", []


# What later releases add, where they have it.
LATER = {
    "group_idx": 1,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 1024,
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "s",
    "lookahead_token_ids": [[1], [2]],
}


def messages(path: Path) -> Iterator[dict[str, Any]]:
    """Return the messages of one release: kind, bytes (hex) and meaning."""
    structs = structs_of(path)
    for name, events in samples():
        yield _message(name, structs, events)
    for name, events in samples():
        later = [(kind, fields | _later(structs[kind])) for kind, fields in events]
        if later != events:
            yield _message(f"{name}, with all fields", structs, later)


def _later(struct: type) -> dict[str, Any]:
    return {name: LATER[name] for name in struct.__struct_fields__ if name in LATER}


def _message(name: str, structs: dict[str, Any], events: list) -> dict[str, Any]:
    made = [structs[kind](**fields) for kind, fields in events]
    batch = structs["KVEventBatch"](ts=1.5, events=made, data_parallel_rank=0)
    return {
        "name": name,
        "payload": msgspec.msgpack.encode(batch).hex(),
        "events": [{"type": kind} | for_json(fields) for kind, fields in events],
    }


def for_json(value: Any) -> Any:
    """For JSON: bytes in hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: for_json(one) for name, one in value.items()}
    return (
        [for_json(one) for one in value] if isinstance(value, list | tuple) else value
    )


def document() -> str:
    """Return the content of testdata/messages.json, a message per line."""
    lines = [
        f"{json.dumps(release)}: [\n"
        + ",\n".join(json.dumps(message) for message in messages(path))
        + "\n]"
        for release, path in releases().items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(document())
