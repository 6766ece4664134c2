# SPDX-License-Identifier: Apache-2.0
"""Take whole sessions out of a trace, at random, in two passes over the file.

The first pass notes which session each request belongs to and gives every session a
place in a random order that its name and the seed decide alone. The shortest beginning
of that order with the wanted number of requests is the sample; the second pass writes
it. A session takes its sub-agents along.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtax_fleet.trace import trace_file
from kvtax_fleet.trace.request import Request, TraceError
from kvtax_fleet.trace.reuse import SessionNumbers, mix, session_keys
from kvtax_fleet.trace.trace_file import Lines

CHUNK = 1 << 14


def sample(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    target_requests: int,
    seed: int,
    read: Callable[[], Iterator[Request]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Write a sample of a trace to `out` in our own format; return its header.

    `read` reads the trace from its beginning; `options` say how, for the header.
    Memory: 16 bytes per request.

    Raises TraceError: the trace has fewer requests, is not what it should be or changes
    in between; nothing is written then.
    """
    trace_file.require_file(path)
    sessions, order = _survey(read(), seed)
    if target_requests > len(sessions):
        raise TraceError(
            f"{path}: {target_requests} requests wanted of {len(sessions)}: use the "
            "trace itself, or a smaller --target-requests"
        )
    chosen = _choose(sessions, order, target_requests)
    header = {
        "requests": int(chosen.sum()),
        "source": {
            "made_by": "kvtax trace sample",
            "file": Path(path).name,
            "sha256": _sha256(path),
            "read_with": options,
            "target_requests": target_requests,
            "seed": seed,
            "requests": len(sessions),
            "sessions": len(np.unique(sessions)),
            "sessions_chosen": len(np.unique(sessions[chosen])),
        },
    }
    trace_file.write_trace(out, header, itertools.compress(read(), chosen.tolist()))
    return header


def _survey(
    requests: Iterable[Request], seed: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Find each request's session (int32) and that session's place (uint64)."""
    numbers = SessionNumbers()
    sessions, order = array("i"), array("Q")
    salt = mix(np.array([seed], np.uint64))
    roots: dict[str, str] = {}  # of sub-agents
    for chunk in _chunks(requests):
        names = []
        for request in chunk:
            if request.parent is not None and request.turn == 0:
                roots[request.session] = roots.get(request.parent, request.parent)
            names.append(roots.get(request.session, request.session))
        sessions.frombytes(numbers.of(names).tobytes())
        order.frombytes(mix(session_keys(names) ^ salt).tobytes())
    return np.frombuffer(sessions, np.int32), np.frombuffer(order, np.uint64)


def _chunks(requests: Iterable[Request]) -> Iterator[list[Request]]:
    requests = iter(requests)
    while chunk := list(itertools.islice(requests, CHUNK)):
        yield chunk


def _choose(sessions: NDArray[Any], order: NDArray[Any], target: int) -> NDArray[Any]:
    """Mark the requests to take."""
    firsts, counts = np.unique(sessions, return_counts=True)
    ranked = np.argsort(order[firsts])
    enough = int(np.searchsorted(np.cumsum(counts[ranked]), target)) + 1
    return np.isin(sessions, firsts[ranked[:enough]])


def _sha256(path: str | PathLike[str]) -> str:
    """Hash the unpacked text: packing a trace anew does not change its identity."""
    digest = hashlib.sha256()
    for line in Lines(path):
        digest.update(line)
    return digest.hexdigest()
