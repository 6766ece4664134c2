# SPDX-License-Identifier: Apache-2.0
"""Whole sessions of a trace, chosen at random.

A session's name and the seed alone decide its place in a random order. The shortest
beginning of that order with the wanted number of requests is the sample. A session
takes along its sub-agents, whose `parent` it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from kvtax_fleet.trace.request import Request, TraceError


def sample(requests: Sequence[Request], wanted: int, seed: int) -> list[Request]:
    """Return whole sessions with at least `wanted` requests, in order of arrival.

    Raises TraceError if the trace has fewer.
    """
    if wanted > len(requests):
        raise TraceError(
            f"--requests {wanted:,}: the trace has {len(requests):,}; take fewer"
        )
    roots: dict[str, str] = {}
    for request in requests:
        if request.parent is not None and request.turn == 0:
            roots[request.session] = roots.get(request.parent, request.parent)
    names = [roots.get(request.session, request.session) for request in requests]
    counts = Counter(names)
    chosen: set[str] = set()
    taken = 0
    for name in sorted(counts, key=lambda name: _place(name, seed)):
        if taken >= wanted:
            break
        chosen.add(name)
        taken += counts[name]
    return [
        request for request, name in zip(requests, names, strict=True) if name in chosen
    ]


def _place(session: str, seed: int) -> bytes:
    return blake2b(f"{seed}/{session}".encode(), digest_size=16).digest()
