# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m fleet.trace`, called in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.trace import Request, own
from fleet.trace.__main__ import main
from lab.paths import REPOSITORY

TRACES = REPOSITORY / "traces"
LE62K = TRACES / "claude_code_sessions_le62k.jsonl.gz"
ANY = TRACES / "claude_code_sessions_any.jsonl.gz"
MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl.gz"


def stats(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["stats", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


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
    own.write(path, {"requests": len(requests)}, requests)
    return path


def fails(capsys, says: str, *arguments: object) -> None:
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert captured.out == ""
