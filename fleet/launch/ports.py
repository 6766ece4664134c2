# SPDX-License-Identifier: Apache-2.0
"""Ports for the instances of a fleet, staggered so that no two ever meet.

They lie below the range that the kernel hands out to clients, where a port that is
free now may be somebody's outgoing connection when the instance gets to it.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

FIRST, LAST = 10_000, 32_000
PORTS_AN_INSTANCE = 16
TRIES = 200


class PortsError(Exception):
    """No free ports where they were wanted; the message says which is taken."""


@dataclass(frozen=True)
class Ports:
    """`vllm_internal` is where vLLM begins to look for the ports it chooses itself."""

    http: int
    bootstrap: int
    nixl: int
    direct_read: int
    vllm_internal: int


def reserve(instances: int, base: int | None = None) -> list[Ports]:
    """Ports that were free a moment ago, from `base` on if given.

    Raises PortsError.
    """
    span = instances * PORTS_AN_INSTANCE
    if base is not None:
        if (taken := _first_taken(base, span)) is not None:
            raise PortsError(f"port {taken} is taken: choose another --base-port")
        return _staggered(base, instances)
    for _ in range(TRIES):
        base = random.randrange(FIRST, LAST - span)
        if _first_taken(base, span) is None:
            return _staggered(base, instances)
    raise PortsError(f"no {span} free ports in a row between {FIRST} and {LAST}")


def _staggered(base: int, instances: int) -> list[Ports]:
    starts = range(base, base + instances * PORTS_AN_INSTANCE, PORTS_AN_INSTANCE)
    return [Ports(*range(start, start + 5)) for start in starts]


def _first_taken(base: int, span: int) -> int | None:
    for port in range(base, base + span):
        with socket.socket() as probe:
            # As servers do: a connection that has only just ended is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except (OSError, OverflowError):
                return port
    return None
