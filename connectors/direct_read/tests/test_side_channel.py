# SPDX-License-Identifier: Apache-2.0
"""Direct read's side channel answers clients that hold the secret, and nobody else."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing

import msgspec
import pytest

from connectors.direct_read import server
from connectors.direct_read.client import Client, Connections
from connectors.direct_read.protocol import (
    LENGTH,
    MAC_BYTES,
    MAGIC,
    MAX_FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_HASHES,
    DirectReadError,
    Hello,
    Lookup,
    Offer,
    ProtocolError,
    Seal,
    Validate,
    Validated,
    framed,
)
from connectors.direct_read.server import Server
from connectors.direct_read.tests.fakes import (
    HASHES,
    NONCES,
    OTHER_SECRET,
    PEER,
    SECRET,
    FakeLedger,
    Wire,
    authentic,
    seals,
    serving,
    wait_for,
    works,
)
from kvtax.proc.ports import reserve

# What it is for.


def test_a_client_learns_what_the_peer_is_and_has(client):
    assert client.hello() == PEER
    offer = client.lookup(HASHES)
    assert offer.block_ids == list(range(10))
    assert client.validate(offer.token) == 5
    assert client.validate(offer.token) == 0
    assert client.hello() == PEER


@pytest.mark.parametrize("host", ["a..b", "a" * 100, "no such host"])
def test_a_host_that_cannot_be_is_a_failure_like_any_other(host):
    with pytest.raises(DirectReadError, match="direct read from"):
        Client(host, 1, SECRET).hello()


def test_where_it_cannot_listen_is_said(serves):
    with pytest.raises(OSError, match=f"listen at 127.0.0.1:{serves.port}: Address"):
        Server(FakeLedger(), PEER, SECRET, port=serves.port)
    with pytest.raises(OSError, match="listen at a b:0: Name"):
        Server(FakeLedger(), PEER, SECRET, host="a b")


def test_a_client_asks_for_as_many_blocks_as_fit(client):
    client.hello()
    assert client.lookup([]).block_ids == []
    assert len(client.lookup([b"h" * 64] * 10_000).block_ids) == MAX_HASHES


def test_any_number_of_threads_can_share_a_client(client):
    client.hello()
    answers = []

    def ask(num_hashes: int) -> None:
        for _ in range(50):
            offer = client.lookup(HASHES[:num_hashes])
            answers.append((num_hashes, len(offer.block_ids)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 400
    assert all(asked == offered for asked, offered in answers)


# Who says it.


def test_a_client_with_another_secret_is_not_answered(serves, ledger):
    stranger = Client("127.0.0.1", serves.port, OTHER_SECRET)
    with pytest.raises(DirectReadError, match="secret"):
        stranger.hello()
    assert serves.num_refused == 1
    assert works(serves)


def test_a_frame_of_an_earlier_connection_counts_nowhere(serves, ledger):
    """However recent the connection: nonces, not clocks, make the frame stale."""
    with Wire(serves.port) as wire:
        recorded = [wire.seal.seal(Hello()), wire.seal.seal(Lookup(HASHES))]
        for content in recorded:
            wire.send(content)
            wire.seal.open(wire.receive())
    for content in recorded:
        with Wire(serves.port) as later:
            later.send(content)
            assert later.is_ended()
    assert (ledger.lookups, serves.num_refused) == (1, 2)


def test_no_frame_counts_after_one_that_is_not_authentic(serves, ledger):
    """A stranger's frames cost the server one check, however many come at once."""
    with Wire(serves.port) as wire:
        wire.hello()
        asked = [wire.seal.seal(Lookup(HASHES)) for _ in range(100)]
        forged = bytes(len(asked[0]))
        wire.send(forged, *asked)
        assert wire.is_ended()
    assert (ledger.lookups, serves.num_refused) == (0, 1)


@pytest.mark.parametrize("to_server", [True, False])
def test_only_the_next_frame_of_the_other_end_is_authentic_to_the_bit(to_server):
    """An earlier reply that was held back may say that more was valid."""

    def ends(secret: bytes = SECRET, nonces=NONCES) -> list[Seal]:
        return [Seal(secret, *nonces, server=end) for end in (not to_server, to_server)]

    kind = Validate if to_server else Validated
    sender, receiver = ends()
    first, second = (sender.seal(kind(n)) for n in range(2))
    others = [ends(OTHER_SECRET)[0], receiver]
    for which in range(2):
        nonces = [*NONCES]
        nonces[which] = b"another nonce .."
        others.append(ends(nonces=nonces)[0])
    strays = [other.seal(kind(0)) for other in others]
    for bit in range(len(first) * 8):
        changed = bytearray(first)
        changed[bit // 8] ^= 1 << bit % 8
        strays.append(bytes(changed))
    for stray in (second, *strays):
        with pytest.raises(ProtocolError, match="authentic"):
            receiver.open(stray)
    assert [receiver.open(content) for content in (first, second)] == [kind(0), kind(1)]
    with pytest.raises(ProtocolError, match="authentic"):
        receiver.open(second)


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes ."])
def test_a_secret_must_keep_somebody_out(secret):
    with pytest.raises(ValueError, match="16 bytes"):
        Client("127.0.0.1", 1, secret)
    with pytest.raises(ValueError, match="16 bytes"):
        Server(FakeLedger(), PEER, secret)


# What can be said.


def test_what_is_no_message_ends_the_connection_although_it_is_authentic(
    serves, ledger
):
    messages = [
        {"type": "lookup", "hashes": [b"h" * 32], "more": 1},
        {"type": "lookup", "hashes": [b"h"] * (MAX_HASHES + 1)},
        {"type": "lookup", "hashes": [b"h" * 65]},
        {"type": "lookup", "hashes": [b""]},
        {"type": "lookup", "hashes": ["text"]},
        {"type": "lookup"},
        {"type": "validate", "token": -1},
        {"type": "validate", "token": 1 << 63},
        {"type": "validate", "token": 1.0},
        {"type": "offer", "token": 1, "block_ids": [], "stopped": ""},
        {"type": "unknown"},
        [],
        None,
    ]
    payloads = [msgspec.msgpack.encode(message) for message in messages]
    payloads += [b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000]
    payloads += [b"\x81\xa4type\xa1\xff", b"\x81\xa1\xff\x00"]
    for payload in payloads:
        with Wire(serves.port) as wire:
            wire.hello()
            wire.send(authentic(wire.seal, payload))
            assert wire.is_ended()
    assert works(serves)
    assert (ledger.lookups, serves.num_refused) == (0, len(payloads))


def test_a_frame_that_is_too_long_ends_the_connection(serves):
    with Wire(serves.port) as wire:
        wire.sock.sendall(LENGTH.pack(MAX_FIRST_FRAME_BYTES + 1))
        assert wire.is_ended()
    with Wire(serves.port) as wire:
        wire.hello()
        wire.sock.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
        assert wire.is_ended()
    assert works(serves)


def test_neither_end_says_what_is_too_long():
    client, server = seals()
    long = Offer(1, [1 << 62] * 200_000, "")
    with pytest.raises(ProtocolError, match="too long"):
        server.seal(long)
    with pytest.raises(ProtocolError, match="too long"):
        framed(b"x" * (MAX_FRAME_BYTES + 1))
    # Nor has it been counted.
    server.open(client.seal(Hello()))
    assert client.open(server.seal(PEER)) == PEER


def test_a_stranger_hears_a_greeting_and_no_more(serves):
    _, seal = seals(client=OTHER_SECRET)
    said = [b"", b"x", b"x" * MAC_BYTES, b"x" * 100, seal.seal(PEER)]
    for content in said:
        with Wire(serves.port, OTHER_SECRET) as wire:
            wire.send(content)
            assert wire.is_ended()
    assert serves.num_refused == len(said)


def test_messages_are_what_they_were():
    """The wire format; a new version of it must have a new MAGIC."""
    assert MAGIC == b"kv-direct-read/3"
    client, _ = seals()
    content = client.seal(Lookup([b"h"]))
    assert content[MAC_BYTES:] == msgspec.msgpack.encode(
        {"type": "lookup", "hashes": [b"h"]}
    )


CLIENT = "connectors.direct_read.client"


@pytest.fixture
def kept():
    with closing(Connections(SECRET)) as kept:
        yield kept


def at(serves: Server) -> tuple[str, int]:
    return "127.0.0.1", serves.port


def test_who_asks_again_asks_over_the_same_connection(kept, serves):
    with kept.to(at(serves)) as first:
        assert first.peer == PEER
        token = first.lookup(HASHES).token
        there = set(serves._connections)
    with kept.to(at(serves)) as again:
        assert again.peer == PEER
        assert again.validate(token) == 5
        assert serves._connections == there


def test_two_at_once_have_one_each_and_both_are_kept(kept, serves):
    for _ in range(2):
        with kept.to(at(serves)) as first, kept.to(at(serves)) as other:
            assert first is not other
            assert first.lookup(HASHES).block_ids and other.lookup(HASHES).block_ids
            assert len(serves._connections) == 2


def test_a_peer_that_was_started_anew_is_met_anew(kept, ledger):
    """Its memory is elsewhere: what the old process said of itself is void."""
    port = reserve(1)[0].http
    with serving(ledger, port=port) as serves, kept.to(at(serves)) as client:
        assert client.peer == PEER
    other = msgspec.structs.replace(PEER, fingerprint={"model": "another"})
    with serving(ledger, other, port) as serves, kept.to(at(serves)) as client:
        assert client.peer == other
        assert client.lookup(HASHES).block_ids


def test_after_an_error_nothing_is_kept(kept, serves):
    with pytest.raises(DirectReadError), kept.to(at(serves)) as broken:
        broken.close()
        broken.lookup(HASHES)
    with kept.to(at(serves)) as client:
        assert client is not broken
        assert client.lookup(HASHES).block_ids


def test_no_more_are_kept_than_were_used_last(ledger, monkeypatch):
    monkeypatch.setattr(f"{CLIENT}.MAX_KEPT", 2)
    with closing(Connections(SECRET)) as kept, ExitStack() as stack:
        peers = [stack.enter_context(serving(ledger)) for _ in range(3)]
        clients = []
        for peer in (peers[0], peers[1], peers[0], peers[2]):
            with kept.to(at(peer)) as client:
                clients.append(client)
        assert [client.is_connected() for client in clients] == [1, 0, 1, 1]


def test_one_that_nobody_has_used_for_long_is_not_kept(kept, serves, monkeypatch):
    with kept.to(at(serves)) as old:
        pass
    monkeypatch.setattr(f"{CLIENT}.KEPT_S", 0)
    with kept.to(at(serves)) as client:
        assert client is not old
        assert not old.is_connected()


def test_close_ends_what_is_kept_and_what_is_still_in_use_after_that(serves):
    kept = Connections(SECRET)
    with kept.to(at(serves)) as first:
        with kept.to(at(serves)) as other:
            pass
        kept.close()
        assert not other.is_connected()
        assert first.lookup(HASHES).block_ids
    assert not first.is_connected()


@pytest.mark.slow
def test_one_that_the_server_has_ended_is_noticed(kept, serves, monkeypatch):
    with kept.to(at(serves)) as quiet:
        there = set(serves._connections)
    with monkeypatch.context() as soon:
        soon.setattr(server, "IDLE_S", 0)
        soon.setattr(server, "TICK_S", 0.01)
        wait_for(lambda: not quiet.is_connected(), 20)
    with kept.to(at(serves)) as client:
        assert client.lookup(HASHES).block_ids
        assert serves._connections.isdisjoint(there)


def test_a_reply_that_nobody_waited_for_is_not_the_next_ones(kept, serves):
    """Whatever the error was."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), kept.to(at(serves)) as client:
        client._connection.receive = fail
        client.lookup(HASHES)
    with kept.to(at(serves)) as client:
        assert client.lookup(HASHES[:3]).block_ids == [0, 1, 2]
