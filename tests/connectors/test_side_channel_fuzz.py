# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives on the side channel, clients that hold the secret are served."""

from __future__ import annotations

import random
import select
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from wire import PEER, SECRET, FakeLedger, Wire, logged, serving

from connectors.direct_read.client import Client
from connectors.direct_read.protocol import (
    LENGTH,
    MAC_BYTES,
    MAX_FRAME_BYTES,
    Hello,
    Lookup,
    ProtocolError,
    Seal,
    Validate,
    framed,
)

BATCH = 250
HASHES = [bytes([n]) * 32 for n in range(4)]


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The bytes with a change somewhere; never the same bytes."""
    changed = bytearray(data)
    while changed == data:
        kind = chance.randrange(5)
        place = chance.randrange(len(changed) + 1)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[place : place + chance.randrange(8)]
        elif kind == 2:
            changed[place:place] = chance.randbytes(chance.randrange(8))
        elif kind == 3:
            changed[place:] = b""
        else:
            size = chance.randrange(1, 16)
            changed[place : place + size] = chance.randbytes(size)
    return bytes(changed)


class Fuzzer:
    """Sends a server invalid frames, and knows how many of them it should drop."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self.sent: Counter[str] = Counter()

    def batch(self) -> None:
        """A connection's worth of frames. Returns when the server has seen all."""
        with Wire(self._port) as wire:
            wire.hello()
            frames = list(self._frames(wire.seal))
            self._push(wire, b"".join(map(framed, frames)))
        self._killer()

    def _frames(self, seal: Seal) -> Iterator[bytes]:
        chance = self._random
        for _ in range(BATCH - 1):
            kind = chance.choice(("random", "mutated", "authentic"))
            self.sent[kind] += 1
            if kind == "random":
                yield chance.randbytes(chance.randrange(200))
                continue
            message = chance.choice(
                (Hello(), Lookup(HASHES), Validate(chance.getrandbits(62)))
            )
            payload = msgspec.msgpack.encode(message)
            if kind == "authentic":
                payload = mutated(chance, payload)
            mac = seal._mac(seal._sends, seal._num_sent, payload)
            if kind == "authentic" and payload:
                # Mutated by a client that holds the secret, so that decoding sees it.
                seal._num_sent += 1
                yield mac + payload
            else:
                yield mutated(chance, mac + payload)

    def _push(self, wire: Wire, data: bytes) -> None:
        """Send, reading what comes back; end when the server has read all of it."""
        view = memoryview(data)
        wire.sock.setblocking(False)
        while view:
            readable, writable, _ = select.select([wire.sock], [wire.sock], [], 10)
            assert readable or writable, "the server does not read"
            if readable:
                assert wire.sock.recv(1 << 16), "the server has ended the connection"
            if writable:
                view = view[wire.sock.send(view) :]
        # The server ends it when it comes upon this.
        wire.sock.setblocking(True)
        wire.sock.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
        wire.sock.settimeout(10)
        try:
            while wire.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def _killer(self) -> None:
        """A connection that is not even framed, from the start or after a greeting."""
        self.sent["unframed"] += 1
        with Wire(self._port) as wire:
            if self._random.random() < 0.5:
                wire.hello()
            wire.sock.sendall(self._random.randbytes(self._random.randrange(64)))


def fuzz(num_frames: int) -> Counter[str]:
    """Serve a valid client throughout. Returns what was sent and what came of it."""
    ledger = FakeLedger()
    served = 0
    done = threading.Event()
    errors: list[BaseException] = []

    def be_served() -> None:
        nonlocal served
        try:
            with closing(Client("127.0.0.1", server.port, SECRET, 10)) as client:
                assert client.hello() == PEER
                while not done.is_set():
                    offer = client.lookup(HASHES)
                    assert len(offer.block_ids) == len(HASHES)
                    assert client.validate(offer.token) == len(HASHES) // 2
                    served += 1
        except BaseException as error:
            errors.append(error)

    with serving(ledger) as server:
        valid = threading.Thread(target=be_served)
        valid.start()
        fuzzer = Fuzzer(server.port, seed=num_frames)
        try:
            while (fuzzer.sent.total() < num_frames or not served) and not errors:
                fuzzer.batch()
        finally:
            done.set()
            valid.join()
        if errors:
            raise errors[0]
        assert server._thread.is_alive()
        with closing(Client("127.0.0.1", server.port, SECRET)) as client:
            assert client.hello() == PEER
        # The server has seen and dropped all random and mutated frames.
        assert server.num_dropped >= fuzzer.sent["random"] + fuzzer.sent["mutated"]
        dropped = server.num_dropped
    return fuzzer.sent + Counter(served=served, dropped=dropped)


def test_a_thousand_frames():
    with logged() as lines:
        counts = fuzz(1_000)
    assert counts["served"] > 0
    assert not lines


@pytest.mark.long
def test_a_million_frames():
    with logged() as lines:
        counts = fuzz(1_000_000)
    assert counts["served"] > 1_000
    assert not lines


def test_a_client_believes_no_mutated_reply():
    chance = random.Random(1)
    nonces = b"s" * 16, b"c" * 16
    client = Seal(SECRET, *nonces, server=False)
    content = Seal(SECRET, *nonces, server=True).seal(PEER)
    for _ in range(5_000):
        with pytest.raises(ProtocolError):
            client.open(mutated(chance, content))
    assert len(content) > MAC_BYTES
    assert client.open(content) == PEER
