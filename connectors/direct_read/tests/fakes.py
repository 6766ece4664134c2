# SPDX-License-Identifier: Apache-2.0
"""A stand-in ledger, frames by hand, and a transfer engine that fails as requested."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from connectors.direct_read.client import Client
from connectors.direct_read.protocol import (
    GREETING_BYTES,
    LENGTH,
    MAGIC,
    MAX_HASHES,
    Hello,
    Offer,
    Peer,
    Seal,
    WorkerAddress,
    framed,
    new_nonce,
    nonce_of,
)
from connectors.direct_read.reads import DONE, Region
from connectors.direct_read.server import Server

SECRET, OTHER_SECRET = secrets.token_bytes(), secrets.token_bytes()
HASHES = [bytes([n]) * 32 for n in range(10)]
NONCES = (b"server nonce ...", b"client nonce ...")
PEER = Peer(
    {"model": "m", "block_size": "16"}, [WorkerAddress("host:1234", [4096], [512])]
)


class FakeLedger:
    """Has all blocks, and finds half of an offer valid."""

    def __init__(self) -> None:
        self.lookups = 0
        self.num_hashes: dict[int, int] = {}

    def lookup(self, hashes: list[bytes]) -> Offer:
        assert len(hashes) <= MAX_HASHES
        assert all(type(block_hash) is bytes for block_hash in hashes)
        self.lookups += 1
        self.num_hashes[self.lookups] = len(hashes)
        self.num_hashes.pop(self.lookups - 1_000, None)
        return Offer(self.lookups, list(range(len(hashes))), "")

    def validate(self, token: int) -> int:
        return self.num_hashes.pop(token, 0) // 2


@contextmanager
def logged() -> Iterator[list[str]]:
    """What direct read logs, at any level, whether or not vLLM has set its loggers."""
    logger = logging.getLogger("vllm.direct_read")
    handler, lines = logging.Handler(), []
    handler.emit = lambda record: lines.append(handler.format(record))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def serving(ledger: object | None = None, peer: Peer = PEER, port: int = 0):
    with closing(Server(ledger or FakeLedger(), peer, SECRET, port=port)) as server:
        yield server


class Wire:
    """A client's connection, for frames that a client would not send."""

    def __init__(
        self, port: int, secret: bytes = SECRET, timeout_s: float = 120.0
    ) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s)
        nonce = new_nonce()
        self.sock.sendall(framed(MAGIC + nonce))
        greeting = self.receive()
        assert len(greeting) == GREETING_BYTES
        self.seal = Seal(secret, nonce_of(greeting), nonce, server=False)

    def send(self, *contents: bytes) -> None:
        self.sock.sendall(b"".join(map(framed, contents)))

    def receive(self) -> bytes:
        """The next frame's content. Raises EOFError, or TimeoutError."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self._exactly(length)

    def hello(self) -> Peer:
        self.send(self.seal.seal(Hello()))
        return self.seal.open(self.receive())

    def is_ended(self) -> bool:
        """Whether the server has ended the connection, without a word."""
        try:
            return not self.sock.recv(1)
        except ConnectionError:
            return True

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self.sock.recv(num_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def wait_for(condition: Callable[[], object], within_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def works(serves: Server) -> bool:
    with closing(Client("127.0.0.1", serves.port, SECRET)) as client:
        return client.hello() == PEER


def seals(client: bytes = SECRET, server: bytes = SECRET) -> tuple[Seal, Seal]:
    """Both ends of one connection."""
    return Seal(client, *NONCES, server=False), Seal(server, *NONCES, server=True)


def authentic(seal: Seal, payload: bytes) -> bytes:
    """An authentic frame with any payload, which does not count as sent."""
    return seal._mac(seal._sends, seal._num_sent, payload) + payload


NUM_BLOCKS = 24
BLOCK_BYTES = [3, 5]
# Where the peer's regions are, in its memory and in ours.
PEER_BASES = [0, 100]
BASES = [50, 500]
MEMORY_BYTES = 1000
PENDING, TIMED_OUT = 0, -2
# The polls of a read that does not end before the engine is released.
STUCK = 1 << 40


@dataclass
class Fate:
    """What happens to a read: it ends with the `polls`-th look at it.

    A read that cannot begin returns or raises `begins` instead.
    """

    status: int = DONE
    polls: int = 1
    begins: int | Exception | None = None


@dataclass
class Batch:
    target: int
    source: int
    length: int
    fate: Fate
    ended: bool = False


class FakeEngine:
    """Copies a byte more with each look, the last ones as the read ends.

    Like Mooncake, it reports an end once, and then gives the id to the next read.
    """

    def __init__(self, fates: list[Fate]) -> None:
        self.peer_memory = bytes(i % 251 + 1 for i in range(MEMORY_BYTES))
        self.memory = bytearray(MEMORY_BYTES)
        self.batches: list[Batch] = []
        self._by_id: dict[int, Batch] = {}
        self._fates = iter(fates)
        self.failure_told = False
        self.begun_after_failure = 0
        self.most_in_flight = 0
        # Reads whose fate is STUCK do not end before this is set.
        self.released = threading.Event()

    def batch_transfer_async_read(self, session, buffers, peer_addresses, lengths):
        assert session == "peer:1"
        fate = next(self._fates, Fate())
        self.begun_after_failure += self.failure_told
        if fate.begins is not None:
            self.failure_told = True
            if isinstance(fate.begins, Exception):
                raise fate.begins
            return fate.begins
        batch = Batch(*buffers, *peer_addresses, *lengths, fate)
        self.batches.append(batch)
        batch_id = min(set(range(1, 100)) - set(self._by_id))
        self._by_id[batch_id] = batch
        self.most_in_flight = max(self.most_in_flight, len(self._by_id))
        return batch_id

    def transfer_check_status(self, batch_id):
        batch = self._by_id[batch_id]
        fate = batch.fate
        if fate.polls == STUCK and not self.released.is_set():
            return TIMED_OUT
        fate.polls = 0 if fate.polls == STUCK else fate.polls - 1
        if fate.polls > 0:
            self._copy(batch, 1)
            return PENDING if fate.polls % 2 else TIMED_OUT
        batch.ended = True
        del self._by_id[batch_id]
        if fate.status == DONE:
            self._copy(batch, batch.length)
        else:
            # Some of its bytes have arrived all the same.
            self._copy(batch, batch.length // 2)
            self.failure_told = True
        return fate.status

    def _copy(self, batch: Batch, count: int) -> None:
        end = batch.source + count
        self.memory[batch.target : batch.target + count] = self.peer_memory[
            batch.source : end
        ]

    def assert_quiet(self) -> None:
        assert all(batch.ended for batch in self.batches)


def regions() -> list[Region]:
    return [
        Region(*region) for region in zip(BASES, PEER_BASES, BLOCK_BYTES, strict=True)
    ]


def block(memory: bytes, bases: list[int], block_id: int) -> bytes:
    return b"".join(
        bytes(memory[base + block_id * size : base + (block_id + 1) * size])
        for base, size in zip(bases, BLOCK_BYTES, strict=True)
    )
