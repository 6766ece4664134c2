# SPDX-License-Identifier: Apache-2.0
"""A row of each trace format, and files made of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from fleet.trace import own

REQUEST = {
    "arrival_s": 1.5,
    "session": "a",
    "turn": 0,
    "input_tokens": 40,
    "output_tokens": 3,
    "hashes": [7, 8],
    "block_tokens": 16,
}
MOONCAKE = {
    "timestamp": 1500,
    "input_length": 1030,
    "output_length": 5,
    "hash_ids": [0, 1, 2],
}
CHAT = {
    "chat_id": 5,
    "parent_chat_id": -1,
    "timestamp": 1.25,
    "input_length": 40,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2, 3],
}
SESSION = {
    "id": "a",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 40,
    "requests": [
        {"t": 0.5, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2], "api_time": 4},
        {
            "t": 10,
            "type": "s",
            "in": 190,
            "out": 8,
            "hash_ids": [1, 2, 3],
            "think_time": 5,
        },
        {
            "t": 70,
            "type": "subagent",
            "agent_id": "explore",
            "tool_tokens": 64,
            "requests": [
                {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [7]},
                {"t": 20.25, "type": "n", "in": 70, "out": 1, "hash_ids": [8]},
                {
                    "t": 30,
                    "type": "subagent",
                    "requests": [
                        {"t": 1, "type": "n", "in": 64, "out": 1, "hash_ids": [9]}
                    ],
                },
            ],
        },
        {
            "t": 80,
            "type": "n",
            "in": 190,
            "out": 8,
            "hash_ids": [1, 2, 3],
            "think_time": 75,
        },
    ],
}
SESSION_B = {
    **SESSION,
    "id": "b",
    "requests": [{"t": 0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 5]}],
}


def put(path: Path, *rows: dict | str, end: str = "\n") -> Path:
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + end
    packed = path.suffix == ".gz"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def header(**more: object) -> dict:
    return {"schema": own.SCHEMA, **more}
