# SPDX-License-Identifier: Apache-2.0
"""Connections to peers are kept, and each stands for one process of the peer."""

from __future__ import annotations

from contextlib import ExitStack, closing

import msgspec
import pytest

from connectors.direct_read import server
from connectors.direct_read.client import Connections
from connectors.direct_read.protocol import DirectReadError
from connectors.direct_read.server import Server
from connectors.direct_read.tests.wire import HASHES, PEER, SECRET, serving, wait_for
from kvtax.proc.ports import reserve

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
        with kept.to(at(serves)) as one, kept.to(at(serves)) as other:
            assert one is not other
            assert one.lookup(HASHES).block_ids and other.lookup(HASHES).block_ids
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


def test_a_peer_that_is_gone_is_a_failure(kept, ledger):
    with serving(ledger) as serves, kept.to(at(serves)):
        pass
    with pytest.raises(DirectReadError, match="refused"), kept.to(at(serves)):
        pass


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
    with kept.to(at(serves)) as one:
        with kept.to(at(serves)) as other:
            pass
        kept.close()
        assert not other.is_connected()
        assert one.lookup(HASHES).block_ids
    assert not one.is_connected()


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
