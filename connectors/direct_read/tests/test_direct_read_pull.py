# SPDX-License-Identifier: Apache-2.0
"""Whole pulls, with the real side channel and a transport that fails.

A pull is reported once nothing writes to its blocks any more, and only then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from connectors.direct_read.protocol import Offer, Peer, WorkerAddress
from connectors.direct_read.reads import (
    FAILED,
    LostTrackError,
    Pull,
    Puller,
    read_blocks,
)
from connectors.direct_read.tests.fake_engine import (
    BASES,
    BLOCK_BYTES,
    PEER_BASES,
    STUCK,
    FakeEngine,
    Fate,
    regions,
)
from connectors.direct_read.tests.wire import SECRET, serving, wait_for

# The puller imports vLLM.
pytestmark = pytest.mark.slow


class FakeLedger:
    """Says that `valid` blocks are valid."""

    def __init__(self, valid: int) -> None:
        self.valid = valid
        self.asked: list[int] = []

    def lookup(self, hashes):
        return Offer(0, [], "absent")

    def validate(self, token):
        self.asked.append(token)
        return self.valid


@contextmanager
def pulling(
    fates: list[Fate], valid: int = 100
) -> Iterator[tuple[Puller, FakeEngine, FakeLedger, Callable[..., Pull]]]:
    engine, ledger = FakeEngine(fates), FakeLedger(valid)
    theirs = WorkerAddress("peer:1", PEER_BASES, BLOCK_BYTES)
    ours = WorkerAddress("us:1", BASES, BLOCK_BYTES)
    with (
        serving(ledger, Peer({}, [theirs])) as server,
        closing(Puller(engine, ours, 0, SECRET)) as puller,
    ):

        def pull(name: str = "a", skipped: int = 0, port: int = server.port) -> Pull:
            ids, peer_ids = [1, 3, 5, 7], [2, 2, 4, 9]
            return Pull(name, "127.0.0.1", port, 77, skipped, [theirs], peer_ids, ids)

        try:
            yield puller, engine, ledger, pull
        finally:
            engine.released.set()


def reported(puller: Puller) -> list[tuple[str, list[int]]]:
    """The next report."""
    pulled: list = []
    wait_for(lambda: pulled.extend(puller.take_pulled()) or pulled)
    return [(pull.request_id, pull.failed_block_ids) for pull in pulled]


@pytest.mark.parametrize(
    ("valid", "skipped", "failed"),
    [
        (100, 0, []),
        (4, 0, []),
        (3, 0, [7]),
        (0, 0, [1, 3, 5, 7]),
        (4, 2, [5, 7]),
        (1, 2, [1, 3, 5, 7]),
    ],
)
def test_only_what_the_peer_still_has_counts(valid, skipped, failed):
    with pulling([], valid) as (puller, engine, ledger, pull):
        puller.begin(pull(skipped=skipped))
        assert reported(puller) == [("a", failed)]
        assert ledger.asked == [77]
        assert not puller.is_busy()
        engine.assert_quiet()


def test_only_what_arrived_counts():
    fates = [Fate(), Fate(), Fate(), Fate(FAILED)]
    with pulling(fates) as (puller, engine, _, pull):
        puller.begin(pull())
        assert reported(puller) == [("a", [3, 5, 7])]
        engine.assert_quiet()


def test_where_nothing_arrived_nothing_is_asked():
    with pulling([Fate(begins=0)]) as (puller, _, ledger, pull):
        puller.begin(pull())
        assert reported(puller) == [("a", [1, 3, 5, 7])]
        assert ledger.asked == []


def test_a_peer_that_cannot_be_asked_has_nothing_valid():
    with pulling([]) as (puller, engine, _, pull):
        with serving() as gone:
            pass
        puller.begin(pull(port=gone.port))
        assert reported(puller) == [("a", [1, 3, 5, 7])]
        engine.assert_quiet()


def test_nothing_is_read_before_the_fence():
    with pulling([]) as (puller, engine, _, pull):
        fence = threading.Event()
        puller.begin(pull(), fence.wait)
        time.sleep(0.1)
        assert puller.is_busy()
        assert engine.batches == []
        fence.set()
        assert reported(puller) == [("a", [])]


def test_nothing_is_read_from_a_peer_with_blocks_of_other_sizes():
    with pulling([]) as (puller, engine, _, pull):
        other = pull()
        other.workers = [WorkerAddress("peer:1", PEER_BASES, BLOCK_BYTES[::-1])]
        puller.begin(other)
        assert reported(puller) == [("a", [1, 3, 5, 7])]
        assert engine.batches == []


def test_a_failed_pull_is_not_reported_while_a_read_goes_on():
    stuck = Fate(polls=STUCK)
    with pulling([stuck, Fate(FAILED)]) as (puller, engine, _, pull):
        puller.begin(pull())
        wait_for(lambda: engine.failure_told)
        # Far longer than a pull takes.
        time.sleep(0.2)
        assert puller.take_pulled() == []
        assert puller.is_busy()
        engine.released.set()
        assert reported(puller) == [("a", [1, 3, 5, 7])]
        engine.assert_quiet()


def test_an_unwanted_pull_is_reported_when_quiet_and_not_before():
    stuck = Fate(polls=STUCK)
    with pulling([Fate(), Fate(), stuck, Fate()]) as (puller, engine, _, pull):
        puller.begin(pull())
        wait_for(lambda: len(engine.batches) >= 4)
        puller.cancel({"a", "somebody else"})
        wait_for(lambda: sum(batch.ended for batch in engine.batches) >= 3)
        begun = len(engine.batches)
        time.sleep(0.1)
        assert puller.take_pulled() == []
        engine.released.set()
        ((name, _),) = reported(puller)
        assert name == "a"
        # One read may have been about to begin.
        assert len(engine.batches) <= begun + 1
        engine.assert_quiet()


def test_a_stuck_pull_holds_up_no_other():
    with pulling([Fate(polls=STUCK)]) as (puller, engine, _, pull):
        puller.begin(pull("stuck"))
        wait_for(lambda: engine.batches)
        puller.begin(pull("b"))
        assert reported(puller) == [("b", [])]
        engine.released.set()
        assert reported(puller) == [("stuck", [])]


def test_blocks_of_reads_that_cannot_be_followed_are_never_given_back():
    with pulling([]) as (puller, engine, _, pull):
        engine.transfer_check_status = raises
        puller.begin(pull())
        wait_for(lambda: engine.batches)
        time.sleep(0.1)
        assert puller.take_pulled() == []
        with pytest.raises(LostTrackError):
            read_blocks(engine, "peer:1", regions(), [1], [1], lambda: False)


def raises(batch_id):
    raise RuntimeError("out of order")
