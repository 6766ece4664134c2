# SPDX-License-Identifier: Apache-2.0
"""The trace that all arms of an experiment replay, cut out of a bigger one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvtax_fleet.experiment.config import ID_STRIDE, Workload
from kvtax_fleet.paths import FLEET
from kvtax_fleet.records.arm import TraceFacts
from kvtax_fleet.trace import Request, TraceError, read_trace, write_trace


def make_workload(
    workload: Workload, out: Path, closed_loop: bool, seed: int
) -> TraceFacts:
    """Write the load to `out` (kvtax.trace/1). Raises TraceError."""
    source = FLEET / workload.trace
    sessions: dict[str, list[Request]] = {}
    for request in islice(read_trace(source), workload.requests):
        sessions.setdefault(request.session, []).append(request)
    names = list(sessions)
    if workload.sessions is not None:
        if workload.sessions > len(names):
            raise TraceError(
                f"{source}: {len(names)} sessions where `sessions` wants "
                f"{workload.sessions}: take fewer, or `copies`"
            )
        names = random.Random(seed).sample(names, workload.sessions)
    requests = [
        request
        for copy in range(workload.copies)
        for name in names
        for request in _copied(_cut(sessions[name], workload), copy)
    ]
    if closed_loop:
        # All sessions wait from the start, in an order that does not follow the file's.
        order = {name: place for place, name in enumerate(_shuffled(requests, seed))}
        requests.sort(key=lambda request: (order[request.session], request.turn))
        requests = [msgspec.structs.replace(each, arrival_s=0.0) for each in requests]
    else:
        requests.sort(key=lambda request: (request.arrival_s, request.turn))
    header = {
        "source": source.name,
        "workload": msgspec.to_builtins(workload),
        "requests": len(requests),
    }
    write_trace(out, header, requests)
    return _facts(out, source, requests)


def _cut(session: list[Request], workload: Workload) -> Iterator[Request]:
    for request in session[: workload.max_turns]:
        yield msgspec.structs.replace(
            request,
            output_tokens=_at_most(request.output_tokens, workload.max_output_tokens),
            think_s=_at_most(request.think_s, workload.max_think_s),
        )


def _at_most(value: Any, bound: Any) -> Any:
    return value if value is None or bound is None else min(value, bound)


def _copied(session: Iterable[Request], copy: int) -> Iterator[Request]:
    for request in session:
        if copy == 0:
            yield request
        else:
            yield msgspec.structs.replace(
                request,
                session=f"{request.session}-copy{copy}",
                parent=None,
                hashes=[_other_id(block, copy) for block in request.hashes],
            )


def _other_id(block: int, copy: int) -> int:
    """Move a block id to a copy's ids. Raises TraceError if there is no room."""
    if block >= ID_STRIDE:
        raise TraceError(f"block id {block} is too large for `copies`: leave them out")
    return block + copy * ID_STRIDE


def _shuffled(requests: list[Request], seed: int) -> list[str]:
    names = list(dict.fromkeys(request.session for request in requests))
    random.Random(seed).shuffle(names)
    return names


def _facts(out: Path, source: Path, requests: list[Request]) -> TraceFacts:
    return TraceFacts(
        file=out.name,
        sha256=hashlib.sha256(out.read_bytes()).hexdigest(),
        source=source.name,
        sessions=len({request.session for request in requests}),
        requests=len(requests),
        input_tokens=sum(request.input_tokens for request in requests),
        output_tokens=sum(request.output_tokens for request in requests),
    )
