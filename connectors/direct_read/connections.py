# SPDX-License-Identifier: Apache-2.0
"""Connections to peers, kept for the next request to the same peer.

A new connection wakes the peer's side channel four times more than the request itself,
and each time takes the GIL from the peer's engine. A kept connection wakes it only for
the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from connectors.direct_read.client import Client

# Addresses come with requests, so the number that is kept must have a limit.
MAX_KEPT = 64
# Less than the server lets a quiet one be (server.IDLE_S): it should not end while
# somebody begins to use it.
KEPT_S = 30.0
Address = tuple[str, int]


class _Kept(NamedTuple):
    address: Address
    client: Client
    since_s: float


class Connections:
    """For any number of threads; each has a connection for itself while it asks."""

    def __init__(self, secret: bytes, timeout_s: float = 2.0) -> None:
        self._secret = secret
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []  # last used last
        self._max_kept = MAX_KEPT

    @contextmanager
    def to(self, address: Address) -> Iterator[Client]:
        """A client that has said hello, to the process that is there now.

        Raises DirectReadError. An error inside the block ends the connection.
        """
        client = self._take(address)
        try:
            if not client.is_connected():
                client.hello()
            yield client
        except BaseException:
            client.close()
            raise
        self._keep(_Kept(address, client, time.monotonic()))

    def close(self) -> None:
        """End unused connections now, and those in use after their use."""
        self._max_kept = 0
        self._end_surplus()

    def _take(self, address: Address) -> Client:
        self._end_surplus()
        with self._lock:
            for place in reversed(range(len(self._kept))):
                if self._kept[place].address == address:
                    return self._kept.pop(place).client
        return Client(*address, self._secret, self._timeout_s)

    def _keep(self, used: _Kept) -> None:
        with self._lock:
            self._kept.append(used)
        self._end_surplus()

    def _end_surplus(self) -> None:
        """End connections above the limit, and those unused for too long."""
        expired_s = time.monotonic() - KEPT_S
        with self._lock:
            too_many = len(self._kept) - self._max_kept
            too_old = sum(one.since_s < expired_s for one in self._kept)
            first = max(too_many, too_old)
            ending, self._kept = self._kept[:first], self._kept[first:]
        for one in ending:
            one.client.close()
