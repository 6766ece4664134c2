# SPDX-License-Identifier: Apache-2.0
"""Client of a peer's side channel: description, lookups, validations.

A client is one connection, and the connection stands for the peer's process: addresses
and offers that came over it belong to that process, and the connection ends with it. So
a client never reconnects by itself. After an error everything it was told is void: say
hello again, and use the addresses of that hello.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from connectors.direct_read.protocol import (
    GREETING_BYTES,
    LENGTH,
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_HASHES,
    DirectReadError,
    Hello,
    Lookup,
    Offer,
    Peer,
    ProtocolError,
    Request,
    Seal,
    Validate,
    Validated,
    check_secret,
    framed,
    new_nonce,
    nonce_of,
)

ReplyT = TypeVar("ReplyT", Peer, Offer, Validated)


class _Connection:
    """A socket whose calls all end by a deadline."""

    def __init__(self, address: tuple[str, int], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._sock = socket.create_connection(address, self._left_s())
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.seal: Seal

    def greet(self, secret: bytes) -> None:
        """Exchange nonces; what is sent before has no seal."""
        nonce = new_nonce()
        self.send(MAGIC + nonce)
        server_nonce = nonce_of(self.receive(GREETING_BYTES))
        self.seal = Seal(secret, server_nonce, nonce, server=False)

    def send(self, content: bytes) -> None:
        self._sock.settimeout(self._left_s())
        self._sock.sendall(framed(content))

    def receive(self, limit_bytes: int) -> bytes:
        (length,) = LENGTH.unpack(self._receive_exactly(LENGTH.size))
        if length > limit_bytes:
            raise ProtocolError("a frame that is too long")
        return self._receive_exactly(length)

    def is_quiet(self) -> bool:
        """Return whether nothing arrived, neither a reply nor the connection's end."""
        try:
            self._sock.settimeout(0)
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        # Another thread that waits on it is woken.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _receive_exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self._sock.settimeout(self._left_s())
            part = self._sock.recv(num_bytes - len(data))
            if not part:
                raise ConnectionError("closed by the peer: is its secret another one?")
            data += part
        return bytes(data)

    def _left_s(self) -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class Client:
    """One connection to a peer's side channel, for any number of threads.

    Each call returns or raises DirectReadError within `timeout_s`, including the wait
    for other threads' calls, but not name resolution. Any error ends the connection;
    only hello makes a new one. `peer` is the answer to hello, or None without a
    connection.

    Raises ValueError if the secret is too short.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, timeout_s: float = 2.0
    ) -> None:
        self._address = host, port
        self._secret = check_secret(secret)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self.peer: Peer | None = None

    def hello(self) -> Peer:
        """Connect, again if necessary, and ask what the peer is."""
        self.peer = self._ask(Hello(), Peer)
        return self.peer

    def greeted(self) -> Peer:
        """Return the process that answered hello. Raises DirectReadError before."""
        if self.peer is None:
            raise DirectReadError(f"{self}: not connected, say hello first")
        return self.peer

    def is_connected(self) -> bool:
        """Return whether the connection seems alive, without sending anything.

        For a client that no other thread uses now.
        """
        return self._connection is not None and self._connection.is_quiet()

    def lookup(self, hashes: list[bytes]) -> Offer:
        """Ask for the blocks of these hashes; only the first MAX_HASHES are sent."""
        offer = self._ask(Lookup(hashes[:MAX_HASHES]), Offer)
        if len(offer.block_ids) > len(hashes):
            self.close()
            raise DirectReadError(f"{self}: offered more than was asked for")
        return offer

    def validate(self, token: int) -> int:
        """Ask how many leading blocks of an offer are still valid.

        The answer covers only bytes that had arrived before this call.
        """
        return self._ask(Validate(token), Validated).num_blocks

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self.peer = None
        if connection is not None:
            connection.close()

    def __str__(self) -> str:
        return "direct read from {}:{}".format(*self._address)

    def _ask(self, request: Request, reply_type: type[ReplyT]) -> ReplyT:
        deadline_s = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=self._timeout_s):
            raise DirectReadError(f"{self}: busy for {self._timeout_s} s")
        try:
            connection = self._connected(deadline_s, anew=isinstance(request, Hello))
            connection.send(connection.seal.seal(request))
            reply = connection.seal.open(connection.receive(MAX_FRAME_BYTES))
            if not isinstance(reply, reply_type):
                raise ProtocolError("a reply to something else")
            return reply
        except TimeoutError:
            self.close()
            raise DirectReadError(
                f"{self}: no answer in {self._timeout_s} s: stopped or overloaded"
            ) from None
        # A UnicodeError is a host name that cannot be one.
        except (OSError, UnicodeError, ProtocolError) as error:
            self.close()
            raise DirectReadError(f"{self}: {error}") from error
        except BaseException:
            # A reply that comes late must not be taken for that of the next request.
            self.close()
            raise
        finally:
            self._lock.release()

    def _connected(self, deadline_s: float, *, anew: bool) -> _Connection:
        connection = self._connection
        if anew:
            self.close()
            self._connection = connection = _Connection(self._address, deadline_s)
            connection.greet(self._secret)
        if connection is None:
            raise ConnectionError("not connected, say hello first")
        connection.deadline_s = deadline_s
        return connection


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
    """Connections to peers, reused for the next request to the same peer.

    A new connection wakes the peer's side channel four times more than the request
    itself, and each time takes the GIL from the peer's engine. A reused connection
    wakes it only for the request. For any number of threads: each has a connection for
    itself during a request.
    """

    def __init__(self, secret: bytes, timeout_s: float = 2.0) -> None:
        self._secret = secret
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []  # last used last
        self._max_kept = MAX_KEPT

    @contextmanager
    def to(self, address: Address) -> Iterator[Client]:
        """Yield a client that has said hello to the process that is there now.

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
            too_old = sum(kept.since_s < expired_s for kept in self._kept)
            first = max(too_many, too_old)
            ending, self._kept = self._kept[:first], self._kept[first:]
        for kept in ending:
            kept.client.close()
