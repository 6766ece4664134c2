# SPDX-License-Identifier: Apache-2.0
"""Pulls over a transport that fails late, in part or not at all.

The rule: once a pull has ended nothing writes to its blocks any more, and the blocks
that it reports as good hold the peer's bytes. Readers that break it must fail here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.direct_read.protocol import Offer, Peer, WorkerAddress
from connectors.direct_read.puller import Pull, Puller
from connectors.direct_read.reads import (
    DONE,
    FAILED,
    MAX_IN_FLIGHT,
    LostTrackError,
    Region,
    contiguous_runs,
    read_blocks,
)
from connectors.direct_read.server import Server

SECRET = b"a secret of enough bytes"
NUM_BLOCKS = 24
BLOCK_BYTES = [3, 5]
# Where the peer's regions are, in its memory and in ours.
PEER_BASES = [0, 100]
BASES = [50, 500]
MEMORY_BYTES = 1000
PENDING, TIMED_OUT = 0, -2
# Polls of a read that ends when the engine is released, not before.
STUCK = 1 << 40
DEADLINE_S = 10.0


@dataclass
class Fate:
    """What becomes of a read: it ends with the `polls`-th look at it.

    `begins` is what is returned in its place if it cannot even begin, or raised.
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

    As Mooncake does, it tells of an end once, and then gives the id to the next.
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
        # Reads whose fate is to wait for this do not end before.
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
            # Some of it has come all the same.
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


def check(
    read: Callable[..., int],
    fates: list[Fate],
    block_ids: list[int],
    peer_block_ids: list[int],
) -> None:
    engine = FakeEngine(fates)
    good = read(engine, "peer:1", regions(), block_ids, peer_block_ids, lambda: False)
    engine.assert_quiet()
    for ours, theirs in zip(block_ids[:good], peer_block_ids[:good], strict=True):
        assert block(engine.memory, BASES, ours) == block(
            engine.peer_memory, PEER_BASES, theirs
        )
    assert engine.begun_after_failure == 0
    assert engine.most_in_flight <= MAX_IN_FLIGHT
    # No block that arrived before the first failure is lost.
    runs = contiguous_runs(block_ids, peer_block_ids, 2)
    ends = [batch.fate.status == DONE for batch in engine.batches]
    whole = 0
    for number, run in enumerate(runs):
        if ends[2 * number : 2 * number + 2] != [True, True]:
            break
        whole += run.count
    assert good == whole


some_fates = st.lists(
    st.builds(
        Fate,
        status=st.sampled_from([DONE, DONE, DONE, FAILED]),
        polls=st.integers(1, 6),
        begins=st.sampled_from([None] * 12 + [0, -1, 2**64 - 1, RuntimeError("no")]),
    ),
    max_size=40,
)
some_blocks = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        *[st.permutations(range(16)).map(lambda ids: ids[:count]) for _ in "ab"]
    )
)
contiguous = st.integers(1, 12).map(lambda n: (list(range(4, 4 + n)), list(range(n))))


@given(some_fates, some_blocks | contiguous)
@settings(max_examples=300, deadline=None)
def test_whatever_fails_nothing_is_in_flight_and_what_counts_is_right(fates, blocks):
    check(read_blocks, fates, *blocks)


def test_runs_are_contiguous_on_both_sides():
    runs = contiguous_runs([4, 5, 6, 9, 10, 11], [7, 8, 1, 2, 3, 9], 2)
    assert [(run.block_id, run.peer_block_id, run.count) for run in runs] == [
        (4, 7, 2),
        (6, 1, 1),
        (9, 2, 2),
        (11, 9, 1),
    ]
    assert all(run.missing == 2 for run in runs)


def test_what_has_been_stopped_begins_no_more_and_goes_quiet():
    engine = FakeEngine([Fate(polls=3) for _ in range(10)])
    stopped = iter([False] * 6 + [True] * 100)
    ids = [1, 3, 5, 7, 9]
    good = read_blocks(engine, "peer:1", regions(), ids, ids, lambda: next(stopped))
    assert (good, len(engine.batches)) == (3, 6)
    engine.assert_quiet()


# Readers that must not pass.


def returns_at_the_first_failure(engine, session, regions, ids, peer_ids, stopped):
    """As batch_transfer_sync_read does."""
    runs = contiguous_runs(ids, peer_ids, len(regions))
    batches = begun(engine, session, regions, runs)
    while batches:
        for batch_id in batches:
            status = engine.transfer_check_status(batch_id)
            if status == FAILED:
                return 0
            if status == DONE:
                batches.remove(batch_id)
                break
    return len(ids)


def takes_a_timeout_for_the_end(engine, session, regions, ids, peer_ids, stopped):
    runs = contiguous_runs(ids, peer_ids, len(regions))
    batches = begun(engine, session, regions, runs)
    ends = []
    for batch_id in batches:
        while (status := engine.transfer_check_status(batch_id)) == PENDING:
            pass
        ends.append(status)
    return len(ids) if set(ends) == {DONE} else 0


def looks_at_the_last_one_only(engine, session, regions, ids, peer_ids, stopped):
    """As transfer_check_status does with a batch of many, with its first."""
    runs = contiguous_runs(ids, peer_ids, len(regions))
    batches = begun(engine, session, regions, runs)
    while (status := engine.transfer_check_status(batches[-1])) not in (DONE, FAILED):
        pass
    return len(ids) if status == DONE else 0


def begun(engine, session, regions, runs) -> list[int]:
    return [
        engine.batch_transfer_async_read(
            session,
            [region.address + run.block_id * region.block_bytes],
            [region.peer_address + run.peer_block_id * region.block_bytes],
            [run.count * region.block_bytes],
        )
        for run in runs
        for region in regions
    ]


@pytest.mark.parametrize(
    "read",
    [
        returns_at_the_first_failure,
        takes_a_timeout_for_the_end,
        looks_at_the_last_one_only,
    ],
)
def test_a_reader_that_breaks_the_rule_is_found_out(read):
    fates = [Fate(polls=4), Fate(FAILED, polls=1), Fate(polls=5), Fate(polls=2)]
    with pytest.raises(AssertionError):
        check(read, fates, [1, 5], [2, 7])


# Whole pulls, with the real side channel.


class FakeLedger:
    """Says that so many blocks are valid, or fails."""

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
    server = Server(ledger, Peer({}, [theirs]), SECRET)
    puller = Puller(engine, ours, 0, SECRET)

    def pull(name: str = "a", skipped: int = 0, port: int = server.port) -> Pull:
        ids = [1, 3, 5, 7]
        peer_ids = [2, 2, 4, 9]
        return Pull(name, "127.0.0.1", port, 77, skipped, [theirs], peer_ids, ids)

    try:
        yield puller, engine, ledger, pull
    finally:
        engine.released.set()
        puller.close()
        server.close()


def reported(puller: Puller) -> list[tuple[str, list[int]]]:
    """The next report."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (pulled := puller.take_pulled()):
        assert time.monotonic() < deadline_s, "no report"
        time.sleep(0.001)
    return [(one.request_id, one.failed_block_ids) for one in pulled]


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
        other = Server(FakeLedger(100), Peer({}, []), b"another secret, of 16+")
        other.close()
        puller.begin(pull(port=other.port))
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
        # The one that may have been about to begin.
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


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
