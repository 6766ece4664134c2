# SPDX-License-Identifier: Apache-2.0
"""What clients of a made-up server would have written, the driver and the replayer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from made_up_server import served

from lab.records.engine_requests import ids_of_completion
from lab.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader
from lab.records.requests import DriverEnd, PhaseStart, RequestRecord, RequestsHeader

# What every request waited for outside its engine.
BEFORE_US, WAY_THERE_US, WAY_BACK_US = 300, 1_000, 2_000
ENDED = {"scheduled": 0, "ok": 0, "failed": 0, "cancelled": 0}


def serve(
    folder: Path,
    names: Sequence[str],
    *,
    ids: str = "hashed",
    seed: int = 1,
    output_tokens: int | None = None,
) -> dict[str, dict]:
    """A server of requests with these X-Request-Ids: what it recorded of each."""
    server = served(folder, steps=8 * len(names), seed=seed)
    server.header["ids"] = ids
    assert len(server.requests) == len(names)
    for name, request in zip(names, server.requests, strict=True):
        request["id"] = ids_of_completion(name)[ids == "hashed"]
        request["before_engine_us"] = BEFORE_US
        if output_tokens is not None:
            request["output_tokens"] = output_tokens
    for request in server.requests:
        request["ttft_ends_ns"] = server.ends_ns(request["first_token_step"])
        request["e2e_ends_ns"] = server.ends_ns(request["last_step"])
    server.write()
    return dict(zip(names, server.requests, strict=True))


def outcome(request: dict) -> dict:
    """How it went for its client."""
    outside_ns = (BEFORE_US + WAY_THERE_US) * 1_000
    return {
        "status": "ok",
        "sent_ns": request["arrival_ns"] - outside_ns,
        "first_token_ns": request["ttft_ends_ns"] + WAY_BACK_US * 1_000,
        "end_ns": request["e2e_ends_ns"] + WAY_BACK_US * 1_000,
    }


def driven(requests: dict[str, dict]) -> list[RequestRecord]:
    return [
        RequestRecord(
            id=int(name),
            phase="growth",
            prompt_tokens=request["prompt_tokens"],
            output_tokens=request["output_tokens"],
            **outcome(request),
        )
        for name, request in requests.items()
    ]


def replayed(requests: dict[str, dict]) -> list[ReplayedRequest]:
    return [
        ReplayedRequest(
            id=name,
            session=name.partition("/")[0],
            turn=0,
            usage_prompt_tokens=request["prompt_tokens"],
            usage_completion_tokens=request["output_tokens"],
            **outcome(request),
        )
        for name, request in requests.items()
    ]


def write_lines(path: Path, *lines: msgspec.Struct) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    return path


def drive(folder: Path, records: list[RequestRecord]) -> Path:
    head = (RequestsHeader(scheduled=len(records)), PhaseStart("growth", 0))
    return write_lines(folder / "requests.jsonl", *head, *records, DriverEnd(**ENDED))


def replay(folder: Path, records: list[ReplayedRequest]) -> Path:
    return write_lines(
        folder / "replay.jsonl", ReplayHeader(), *records, ReplayEnd(**ENDED)
    )
