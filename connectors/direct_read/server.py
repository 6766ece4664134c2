# SPDX-License-Identifier: Apache-2.0
"""An instance's side channel: says what it is, looks up and validates, in a thread.

A client without the secret gets a nonce and no more. The first frame that is too long,
not authentic or no message ends its connection, so each frame of a stranger costs him a
connection. The resources of strangers are bounded: at most a quarter of MAX_CONNECTIONS
when others want them, for UNPROVEN_S, and a few kilobytes of memory each. Clients keep
their connections. A connection that has been quiet for SPARED_S may be ended to make
room; after IDLE_S it ends in any case.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from connectors.direct_read.protocol import (
    GREETING_BYTES,
    LENGTH,
    MAGIC,
    MAX_FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    Hello,
    Lookup,
    Peer,
    ProtocolError,
    Reply,
    Request,
    Seal,
    Validated,
    check_secret,
    framed,
    new_nonce,
    nonce_of,
)

if TYPE_CHECKING:
    from connectors.direct_read.ledger import BlockLedger

# vLLM shows what its own loggers say.
logger = logging.getLogger("vllm.direct_read")

# The name of the thread that answers, for those who measure what it costs.
THREAD_NAME = "direct_read_server"
MAX_CONNECTIONS = 256
UNPROVEN_S = 10.0
SPARED_S = 1.0
IDLE_S = 60.0
# Small, because the frames in it are checked in one go, and that holds the GIL.
RECEIVE_BYTES = 1 << 14
TICK_S = 1.0


class _Connection:
    """One client: its input and output, and whether it has proven to be one of ours."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock = sock
        # When it was accepted, or later proved that it holds the secret.
        self.active_s = time.monotonic()
        self.proven = False
        self.received = bytearray()
        self._secret = secret
        self._nonce = new_nonce()
        self._seal: Seal | None = None
        self.to_send = bytearray(framed(MAGIC + self._nonce))

    def next_content(self) -> bytes | None:
        """Return the next frame's content, once it is there. Raises ProtocolError."""
        if len(self.received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self.received)
        if self._seal is None:
            limit = GREETING_BYTES
        else:
            limit = MAX_FRAME_BYTES if self.proven else MAX_FIRST_FRAME_BYTES
        if length > limit:
            raise ProtocolError("a frame that is too long")
        end = LENGTH.size + length
        if len(self.received) < end:
            return None
        content = bytes(self.received[LENGTH.size : end])
        del self.received[:end]
        return content

    def request_in(self, content: bytes) -> Request | None:
        """Open a frame. Raises ProtocolError if it is not authentic, or no message."""
        if self._seal is None:
            nonces = self._nonce, nonce_of(content)
            self._seal = Seal(self._secret, *nonces, server=True)
            return None
        request = self._seal.open(content)
        self.proven = True
        self.active_s = time.monotonic()
        return request

    def reply(self, reply: Reply) -> None:
        assert self._seal is not None
        self.to_send += framed(self._seal.seal(reply))


class Server:
    """Answers clients that hold the secret, until it is closed.

    Args:
        ledger: Answers lookups and validations, always in the server's thread.
        peer: The answer to hello.
        secret: At least protocol.MIN_SECRET_BYTES bytes, the same at the clients.
        host: Where to listen. Whoever can connect can try to guess the secret.
        port: 0 for any free one; the attribute `port` says which.

    Raises OSError that says where if it cannot listen there, ValueError if the secret
    is too short.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        peer: Peer,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._ledger = ledger
        self._peer = peer
        self._secret = check_secret(secret)
        # Connections that were ended because of what was sent on them.
        self.num_refused = 0
        self._listener = _listening(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[_Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end all connections and the thread."""
        self._closing.set()
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        tick_s = 0.0
        while not self._closing.is_set():
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:
                    self._serve(key.data)
            if (now_s := time.monotonic()) - tick_s >= TICK_S:
                tick_s = now_s
                self._end_idle(now_s)
        for connection in list(self._connections):
            self._end(connection)
        self._listener.close()
        self._woken.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            # Gone again, or this process has too many files open: not in a loop.
            time.sleep(0.01)
            return
        if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
            sock.close()
            return
        self._connections.add(connection := _Connection(sock, self._secret))
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._serve(connection)

    def _make_room(self) -> bool:
        """End an unproven connection, or one that has been quiet, if there is one."""
        spared_s = time.monotonic() - SPARED_S
        unproven = [c for c in self._connections if not c.proven]
        quiet = [c for c in self._connections if c.proven and c.active_s < spared_s]
        # Strangers keep few places, but enough for clients that have just connected.
        crowded = len(unproven) > MAX_CONNECTIONS // 4
        going = unproven if crowded or not quiet else quiet
        if going:
            self._end(min(going, key=lambda connection: connection.active_s))
        return bool(going)

    def _serve(self, connection: _Connection) -> None:
        """Send, receive and answer as far as possible without waiting."""
        try:
            self._send(connection)
            # A client that does not read its replies is not served any further.
            if not connection.to_send:
                self._receive(connection)
                self._answer(connection)
        except ProtocolError:
            self.num_refused += 1
            self._end(connection)
        except OSError:
            self._end(connection)
        except Exception as error:
            # Without its text, which could hold a hash.
            logger.error("A request of a peer failed: %s", type(error).__name__)
            self._end(connection)

    def _receive(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            data = connection.sock.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError
            connection.received += data

    def _answer(self, connection: _Connection) -> None:
        while not connection.to_send:
            content = connection.next_content()
            if content is None:
                return
            request = connection.request_in(content)
            if request is not None:
                connection.reply(self._reply_to(request))
                self._send(connection)

    def _reply_to(self, request: Request) -> Reply:
        if isinstance(request, Hello):
            return self._peer
        if isinstance(request, Lookup):
            return self._ledger.lookup(request.hashes)
        return Validated(self._ledger.validate(request.token))

    def _send(self, connection: _Connection) -> None:
        if connection.to_send:
            try:
                sent = connection.sock.send(connection.to_send)
            except BlockingIOError:
                sent = 0
            del connection.to_send[:sent]
        events = selectors.EVENT_WRITE if connection.to_send else selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _end_idle(self, now_s: float) -> None:
        for connection in list(self._connections):
            limit_s = IDLE_S if connection.proven else UNPROVEN_S
            if now_s - connection.active_s > limit_s:
                self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(
            error.errno, f"direct read cannot listen at {host}:{port}: {reason}"
        ) from None
