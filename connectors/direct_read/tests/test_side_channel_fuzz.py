# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives on the side channel, clients that hold the secret are served."""

from __future__ import annotations

import random
import threading
from contextlib import closing

import msgspec
import pytest

from connectors.direct_read.client import Client
from connectors.direct_read.protocol import (
    LENGTH,
    MAC_BYTES,
    MAX_FRAME_BYTES,
    Hello,
    Lookup,
    ProtocolError,
    Request,
    Seal,
    Validate,
    framed,
)
from connectors.direct_read.tests.wire import (
    HASHES,
    PEER,
    SECRET,
    Wire,
    authentic,
    logged,
    seals,
    serving,
    works,
)


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


def hostile(chance: random.Random, seal: Seal) -> bytes:
    """Random, a request that was changed, or nonsense from who holds the secret."""
    kind = chance.choice(("random", "mutated", "authentic"))
    if kind == "random":
        return chance.randbytes(chance.randrange(200))
    message = chance.choice((Hello(), Lookup(HASHES), Validate(chance.getrandbits(62))))
    payload = msgspec.msgpack.encode(message)
    if kind == "mutated":
        return mutated(chance, authentic(seal, payload))
    while is_request(payload):
        payload = mutated(chance, payload)
    return authentic(seal, payload)


def is_request(payload: bytes) -> bool:
    try:
        msgspec.msgpack.decode(payload, type=Request)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


@pytest.mark.parametrize(
    "num_frames", [10_000, pytest.param(1_000_000, marks=pytest.mark.long)]
)
def test_hostile_frames_are_no_requests(num_frames):
    chance = random.Random(num_frames)
    client, server = seals()
    for _ in range(num_frames):
        with pytest.raises(ProtocolError):
            server.open(hostile(chance, client))
        # That an authentic one has been counted would refuse the next for its number.
        server._num_received = 0


def attack(chance: random.Random, port: int) -> None:
    """Send bad frames at once, until the end; then what is not even framed."""
    with Wire(port) as wire:
        if chance.random() < 0.5:
            wire.hello()
        bad = framed(hostile(chance, wire.seal))
        if chance.random() < 0.1:
            bad = LENGTH.pack(MAX_FRAME_BYTES + 1) + bad
        wire.sock.sendall(bad * chance.randrange(1, 5))
        assert wire.is_ended()
    with Wire(port) as wire:
        wire.sock.sendall(chance.randbytes(chance.randrange(64)))


def fuzz(num_connections: int) -> int:
    """Serve a valid client throughout; return how often."""
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

    with serving() as server:
        valid = threading.Thread(target=be_served)
        valid.start()
        chance, attacks = random.Random(num_connections), 0
        try:
            while (attacks < num_connections or not served) and not errors:
                attack(chance, server.port)
                attacks += 1
        finally:
            done.set()
            valid.join()
        if errors:
            raise errors[0]
        assert works(server)
        # One bad frame of each connection was looked at, and no more.
        assert attacks <= server.num_refused <= 2 * attacks
    return served


@pytest.mark.parametrize(
    ("num_connections", "least_served"),
    [
        pytest.param(1_000, 1, marks=pytest.mark.slow),
        pytest.param(20_000, 1_001, marks=pytest.mark.long),
    ],
)
def test_a_client_is_served_whatever_others_send(num_connections, least_served):
    with logged() as lines:
        assert fuzz(num_connections) >= least_served
    assert not lines


def test_a_client_believes_no_mutated_reply():
    chance = random.Random(1)
    client, server = seals()
    content = server.seal(PEER)
    for _ in range(5_000):
        with pytest.raises(ProtocolError):
            client.open(mutated(chance, content))
    assert len(content) > MAC_BYTES
    assert client.open(content) == PEER
