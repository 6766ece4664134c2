# SPDX-License-Identifier: Apache-2.0
"""Lookups of a prompt's blocks at peers, in threads, so the engine never waits."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm.logger import init_logger

from connectors.direct_read import fingerprint
from connectors.direct_read.client import Address, Connections
from connectors.direct_read.ledger import TOKEN_LIFETIME_S
from connectors.direct_read.protocol import DirectReadError, Offer, Peer

# vLLM shows what its own loggers say.
logger = init_logger("vllm.direct_read")

NUM_THREADS = 8
# How long a peer that did not answer is not asked again: otherwise each request that
# names it would wait for a timeout.
LEFT_ALONE_S = 5.0
# An offer is not used after this, so that its read ends while it can be validated.
OFFER_LIFETIME_S = TOKEN_LIFETIME_S / 4
# Addresses come with requests, so the number that is remembered must have a limit.
MAX_REMEMBERED = 1024


@dataclass(frozen=True)
class Found:
    """A peer's offer, and where to read it. `failed` if the peer did not answer."""

    offer: Offer
    peer: Peer | None
    deadline_s: float
    failed: bool = False

    def is_stale(self) -> bool:
        return time.monotonic() > self.deadline_s


NOTHING = Found(Offer(0, [], ""), None, float("inf"), failed=True)


class Lookups:
    """Lookups at peers for the engine with this fingerprint."""

    def __init__(self, secret: bytes, ours: dict[str, str]) -> None:
        self._connections = Connections(secret)
        self._ours = ours
        self._executor = ThreadPoolExecutor(NUM_THREADS, "direct-read-lookup")
        self._left_alone_until_s: dict[Address, float] = {}
        self._told: set[tuple[Address, str]] = set()

    def ask(self, address: Address, hashes: list[bytes]) -> Future[Found]:
        """Look up in a thread. The future never fails."""
        return self._executor.submit(self._ask, address, hashes)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._connections.close()

    def _ask(self, address: Address, hashes: list[bytes]) -> Found:
        if self._left_alone_until_s.get(address, 0.0) > time.monotonic():
            return NOTHING
        try:
            return self._found(address, hashes)
        except DirectReadError as error:
            if len(self._left_alone_until_s) >= MAX_REMEMBERED:
                self._left_alone_until_s.clear()
            self._left_alone_until_s[address] = time.monotonic() + LEFT_ALONE_S
            self._tell(address, str(error))
        except Exception:
            logger.exception("Direct read: cannot ask %s:%d", *address)
        return NOTHING

    def _found(self, address: Address, hashes: list[bytes]) -> Found:
        deadline_s = time.monotonic() + OFFER_LIFETIME_S
        # The peer that said hello on this connection is the process that answers on
        # it: another one has its memory elsewhere.
        with self._connections.to(address) as client:
            peer = client.greeted()
            theirs = peer.fingerprint
            if differing := fingerprint.difference(self._ours, theirs):
                self._tell(address, f"its KV cache is not ours: {differing}")
                return NOTHING
            return Found(client.lookup(hashes), peer, deadline_s)

    def _tell(self, address: Address, what: str) -> None:
        """Log a message once per peer."""
        if (address, what) not in self._told:
            if len(self._told) >= MAX_REMEMBERED:
                self._told.clear()
            self._told.add((address, what))
            logger.warning("Direct read: nothing from %s:%d: %s", *address, what)
