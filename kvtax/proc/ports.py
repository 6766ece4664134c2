# SPDX-License-Identifier: Apache-2.0
"""Ports for servers, staggered so that no two servers ever meet.

They lie below the range that the kernel hands out to clients, where a port that is
free now may be somebody's outgoing connection when the server gets to it. They lie
above those that Ray gives its workers by default (10,002 to 19,999), and those that
Mooncake chooses for itself while the servers start.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

import psutil

FIRST, LAST = 20_000, 32_000
LOOPBACK = "127.0.0.1"
PORTS_PER_SERVER = 16
MOST_SERVERS = (LAST - FIRST - 1) // PORTS_PER_SERVER
TRIES = 200


class PortsError(Exception):
    """No free ports are left."""

    exit_code = 3


@dataclass(frozen=True)
class Ports:
    """The ports of one server.

    `bootstrap` is Mooncake's, `nixl` and `direct_read` are side channels of those
    connectors; `vllm_internal` is where vLLM begins to look for the ports it chooses
    itself.
    """

    http: int
    bootstrap: int
    nixl: int
    direct_read: int
    vllm_internal: int


def reserve(servers: int) -> list[Ports]:
    """Find ports for so many servers, free a moment ago. Raises PortsError."""
    span = servers * PORTS_PER_SERVER
    for _ in range(TRIES):
        base = random.randrange(FIRST, LAST - span)
        if all(map(_is_free, range(base, base + span))):
            return staggered(base, servers)
    raise PortsError(f"no {span} free ports in a row between {FIRST} and {LAST}")


def staggered(base: int, servers: int) -> list[Ports]:
    """Return ports for so many servers, from `base` on, whether free or not."""
    starts = range(base, base + servers * PORTS_PER_SERVER, PORTS_PER_SERVER)
    return [
        Ports(
            http=start,
            bootstrap=start + 1,
            nixl=start + 2,
            direct_read=start + 3,
            vllm_internal=start + 6,
        )
        for start in starts
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection that has only just ended is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def listener_pid(port: int) -> int | None:
    """Find the process that listens on a TCP port of this host."""
    for connection in psutil.net_connections("tcp4"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            pid: int | None = connection.pid
            return pid
    return None
