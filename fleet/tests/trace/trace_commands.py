# SPDX-License-Identifier: Apache-2.0
"""`kvtax trace` in this process, and rows and files of every trace format."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
from kvtax.cli import Exit, main
from kvtax.paths import REPOSITORY

from kvtax_fleet.trace import Request, write_trace
from kvtax_fleet.trace.trace_file import SCHEMA

TRACES = REPOSITORY / "fleet" / "traces"
LE62K = TRACES / "claude_code_sessions_le62k.jsonl.xz"
ANY = TRACES / "claude_code_sessions_any.jsonl.xz"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl.xz"


def stats(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["trace", "stats", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def run(*arguments: object) -> int:
    return main(["trace", *map(str, arguments)])


def header_of(path: Path) -> dict:
    with path.open() as file:
        return json.loads(file.readline())


def trace_of(path: Path, turns: dict[str, list[tuple[float, int]]]) -> Path:
    """Sessions by name: arrivals and input tokens of their turns."""
    requests = [
        Request(arrival_s, name, turn, tokens, 10, [], 16, 1.0 if turn else None)
        for name, every in turns.items()
        for turn, (arrival_s, tokens) in enumerate(every)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    write_trace(path, {"requests": len(requests)}, requests)
    return path


def fails(capsys, says: str, *arguments: object) -> None:
    try:
        status = run(*arguments)
    except SystemExit as parser_exit:
        status = parser_exit.code
    assert status == Exit.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith(("kvtax: ", "usage: kvtax trace"))
    assert says in captured.err
    assert captured.out == ""


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
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))
    return path


def header(**more: object) -> dict:
    return {"schema": SCHEMA, **more}
