# SPDX-License-Identifier: Apache-2.0
"""Direct read's side channel when its other end is hostile, slow, stopped or gone."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
import traceback
from contextlib import ExitStack, closing

import msgspec
import pytest

from connectors.direct_read import server
from connectors.direct_read.client import Client
from connectors.direct_read.protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_HASHES,
    DirectReadError,
    Hello,
    Lookup,
    ProtocolError,
    Request,
    Seal,
    Validate,
    Validated,
    framed,
)
from connectors.direct_read.tests.fakes import (
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
from kvtax.proc.ports import reserve

# What it withstands.


def test_strangers_who_say_nothing_do_not_keep_others_out(serves, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(server, "SPARED_S", 0)
    with ExitStack() as stack:
        friend = stack.enter_context(Wire(serves.port))
        friend.hello()
        for _ in range(50):
            stack.enter_context(Wire(serves.port))
        assert works(serves)
        assert friend.hello() == PEER
        assert len(serves._connections) <= 8


@pytest.mark.parametrize("spared_s", [60, 0])
def test_when_it_is_full_who_has_been_quiet_longest_makes_room_and_not_at_once(
    serves, monkeypatch, spared_s
):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(server, "SPARED_S", spared_s)
    with ExitStack() as stack:
        quiet, *friends = [stack.enter_context(Wire(serves.port)) for _ in range(3)]
        for friend in (quiet, *friends):
            friend.hello()
        if spared_s:
            with socket.create_connection(("127.0.0.1", serves.port), 5) as late:
                assert late.recv(1) == b""
            assert quiet.hello() == PEER
        else:
            assert works(serves)
            assert quiet.is_ended()
        assert all(friend.hello() == PEER for friend in friends)


@pytest.mark.slow
def test_who_has_nothing_to_ask_for_a_long_time_is_shown_out(serves, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.5)
    monkeypatch.setattr(server, "TICK_S", 0.05)
    with Wire(serves.port) as quiet:
        quiet.hello()
        assert quiet.is_ended()
    assert works(serves)


@pytest.mark.slow
def test_who_does_not_prove_himself_is_shown_out(serves, monkeypatch):
    with Wire(serves.port) as friend, Wire(serves.port) as stranger:
        friend.hello()
        monkeypatch.setattr(server, "UNPROVEN_S", 0.1)
        monkeypatch.setattr(server, "TICK_S", 0.05)
        assert stranger.is_ended()
        assert friend.hello() == PEER


@pytest.mark.slow
def test_who_does_not_read_his_replies_holds_up_only_himself(serves):
    with Wire(serves.port) as wire:
        wire.hello()
        wire.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(10_000):
                wire.send(wire.seal.seal(Lookup([b"h" * 32] * MAX_HASHES)))
        (connection,) = serves._connections
        assert len(connection.received) + len(connection.to_send) < 2 * MAX_FRAME_BYTES
        assert works(serves)


def test_frames_that_come_all_at_once_or_byte_by_byte_are_answered(serves):
    with Wire(serves.port) as wire:
        contents = [wire.seal.seal(Hello())]
        contents += [wire.seal.seal(Lookup([b"h" * 32] * 500)) for _ in range(20)]
        wire.send(*contents)
        assert wire.seal.open(wire.receive()) == PEER
        for _ in contents[1:]:
            assert len(wire.seal.open(wire.receive()).block_ids) == 500
        for byte in framed(wire.seal.seal(Validate(1))):
            wire.sock.sendall(bytes([byte]))
        assert wire.seal.open(wire.receive()) == Validated(250)


def test_a_ledger_that_fails_ends_that_connection_alone(ledger):
    def fail(hashes):
        raise KeyError(hashes[0])

    ledger.lookup = fail
    with logged() as lines, serving(ledger) as serves:
        with closing(Client("127.0.0.1", serves.port, SECRET)) as client:
            client.hello()
            with pytest.raises(DirectReadError):
                client.lookup([b"\xaa\xbb" * 16])
        assert works(serves)
    assert lines == ["A request of a peer failed: KeyError"]


def test_close_ends_the_thread_the_port_and_all_connections(ledger):
    with serving(ledger) as serves:
        with Wire(serves.port) as wire:
            serves.close()
            assert wire.is_ended()
        assert not serves._thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", serves.port), 1)
        serves.close()


def test_it_listens_on_loopback_unless_told_otherwise(serves):
    assert serves._listener.getsockname()[0] == "127.0.0.1"


# The client's part.


def test_a_client_stands_for_one_process_of_the_peer(ledger):
    """Addresses of the old process must not be used with offers of the new one."""
    port = reserve(1)[0].http
    with serving(ledger, port=port):
        client = Client("127.0.0.1", port, SECRET)
        with pytest.raises(DirectReadError, match="say hello first"):
            client.lookup(HASHES)
        client.hello()
        offer = client.lookup(HASHES)
    with closing(client), serving(ledger, port=port):
        with pytest.raises(DirectReadError):
            client.validate(offer.token)
        for ask in (lambda: client.lookup(HASHES), lambda: client.validate(1)):
            with pytest.raises(DirectReadError, match="say hello first"):
                ask()
        assert client.hello() == PEER
        assert client.lookup(HASHES).block_ids


@pytest.mark.slow
def test_a_client_waits_no_longer_than_it_was_told():
    """Not even for a peer that accepts connections and is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        client = Client("127.0.0.1", stopped.getsockname()[1], SECRET, 0.3)
        began_s = time.monotonic()
        errors = []

        def ask() -> None:
            try:
                client.hello()
            except DirectReadError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 4
        # Not one after the other; a slow machine is not what is tested.
        assert time.monotonic() - began_s < 5


def test_a_client_says_which_peer_is_unreachable():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(DirectReadError, match=f"127.0.0.1:{port}.*refused"):
            Client("127.0.0.1", port, SECRET).hello()


def test_closing_a_client_wakes_who_waits_on_it():
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        client = Client("127.0.0.1", stopped.getsockname()[1], SECRET, 60)
        errors = []

        def ask() -> None:
            with pytest.raises(DirectReadError) as raised:
                client.hello()
            errors.append(raised.value)

        thread = threading.Thread(target=ask)
        thread.start()
        while client._connection is None:
            time.sleep(0.01)
        time.sleep(0.05)
        client.close()
        thread.join(120)
        assert len(errors) == 1


# Hashes.


def test_no_hash_is_in_any_log_error_or_repr(serves, client, ledger, caplog):
    secret_hash = bytes(range(160, 192))
    caplog.set_level(logging.DEBUG)
    with logged() as texts:
        client.hello()
        texts.append(repr(client.lookup([secret_hash] * 3)))
        texts += [repr(Lookup([secret_hash])), str(Lookup([secret_hash]))]
        for wrong in (
            {"type": "lookup", "hashes": [secret_hash], secret_hash.hex(): 1},
            {"type": "lookup", "hashes": secret_hash},
            {"type": secret_hash.hex()},
        ):
            payload = msgspec.msgpack.encode(wrong)
            with Wire(serves.port) as wire:
                wire.hello()
                wire.send(authentic(wire.seal, payload))
                assert wire.is_ended()
            texts += said_of(payload)
        # The hash in place of text: no UTF-8, and Python would quote it.
        texts += said_of(b"\x81\xa4type\xd9\x20" + secret_hash)

        def fail(hashes):
            raise KeyError(hashes)

        ledger.lookup = fail
        with pytest.raises(DirectReadError) as failed:
            client.lookup([secret_hash])
        texts.append(repr(failed.value))
    assert len(texts) > 10
    texts += [logging.Formatter().format(record) for record in caplog.records]
    forms = secret_hash.hex(), repr(secret_hash)[2:-1], str(list(secret_hash))
    for text in texts:
        assert not any(form in text for form in forms)


def said_of(payload: bytes) -> list[str]:
    """Everything that opening an authentic frame with this payload raises."""
    client, server = seals()
    with pytest.raises(ProtocolError) as raised:
        server.open(authentic(client, payload))
    error = raised.value
    return ["".join(traceback.format_exception(error)), repr(error), str(error)]


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


@pytest.mark.slow
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
