# SPDX-License-Identifier: Apache-2.0
"""Reads over a transport that fails late, in part or not at all.

The rule: once the reads of a pull have ended, nothing writes to its blocks any more,
and the blocks reported as good hold the peer's bytes. Readers that break the rule must
fail here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.direct_read.protocol import Offer, Peer, WorkerAddress
from connectors.direct_read.reads import (
    DONE,
    FAILED,
    MAX_IN_FLIGHT,
    LostTrackError,
    Pull,
    Puller,
    contiguous_runs,
    read_blocks,
)
from connectors.direct_read.tests.fakes import (
    BASES,
    BLOCK_BYTES,
    PEER_BASES,
    PENDING,
    SECRET,
    STUCK,
    FakeEngine,
    Fate,
    block,
    regions,
    serving,
    wait_for,
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
    whole = len(block_ids)
    for number, run in enumerate(runs):
        if ends[2 * number : 2 * number + 2] != [True, True]:
            whole = run.first
            break
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
descending = contiguous.map(lambda blocks: tuple(ids[::-1] for ids in blocks))
# Some of the blocks are neighbours, but not in this order.
interleaved = st.permutations(range(12)).map(
    lambda order: tuple([first + i for i in order] for first in (4, 0))
)
any_blocks = some_blocks | contiguous | descending | interleaved


@pytest.mark.slow
@given(some_fates, any_blocks)
@settings(max_examples=300, deadline=None)
def test_whatever_fails_nothing_is_in_flight_and_what_counts_is_right(fates, blocks):
    check(read_blocks, fates, *blocks)


@pytest.mark.slow
@given(any_blocks)
def test_every_block_is_read_once_into_its_place_in_as_few_reads_as_possible(blocks):
    pairs = set(zip(*blocks, strict=True))
    runs = contiguous_runs(*blocks, 2)
    read = [
        (run.block_id + i, run.peer_block_id + i)
        for run in runs
        for i in range(run.count)
    ]
    assert len(read) == len(pairs) and set(read) == pairs
    # A run must end where the next block has another place on either side.
    assert len(runs) == sum(
        (ours + 1, theirs + 1) not in pairs for ours, theirs in pairs
    )
    check(read_blocks, [], *blocks)


def test_runs_are_contiguous_on_both_sides_and_begin_with_the_earliest_block():
    runs = contiguous_runs([4, 5, 6, 9, 10, 11], [7, 8, 1, 2, 3, 9], 2)
    assert [
        (run.block_id, run.peer_block_id, run.count, run.first) for run in runs
    ] == [(4, 7, 2, 0), (6, 1, 1, 2), (9, 2, 2, 3), (11, 9, 1, 5)]
    assert all(run.missing == 2 for run in runs)
    (down,) = contiguous_runs([6, 5, 4], [9, 8, 7], 2)
    assert (down.block_id, down.peer_block_id, down.count, down.first) == (4, 7, 3, 0)


def test_what_has_been_stopped_begins_no_more_and_goes_quiet():
    engine = FakeEngine([Fate(polls=3) for _ in range(10)])
    stopped = iter([False] * 6 + [True] * 100)
    ids = [1, 3, 5, 7, 9]
    good = read_blocks(engine, "peer:1", regions(), ids, ids, lambda: next(stopped))
    assert (good, len(engine.batches)) == (3, 6)
    engine.assert_quiet()


# Readers that break the rule: each begins all reads, and asks wrongly for their ends.


def ends_at_the_first_failure(engine, batches):
    """As batch_transfer_sync_read does."""
    while batches:
        for batch_id in batches:
            status = engine.transfer_check_status(batch_id)
            if status == FAILED:
                return False
            if status == DONE:
                batches.remove(batch_id)
                break
    return True


def takes_a_timeout_for_the_end(engine, batches):
    ends = set()
    for batch_id in batches:
        while (status := engine.transfer_check_status(batch_id)) == PENDING:
            pass
        ends.add(status)
    return ends == {DONE}


def looks_at_the_last_one_only(engine, batches):
    """As transfer_check_status does, for the first read of a batch of many."""
    while (status := engine.transfer_check_status(batches[-1])) not in (DONE, FAILED):
        pass
    return status == DONE


@pytest.mark.parametrize(
    "all_done",
    [
        ends_at_the_first_failure,
        takes_a_timeout_for_the_end,
        looks_at_the_last_one_only,
    ],
)
def test_a_reader_that_breaks_the_rule_is_found_out(all_done):
    def read(engine, session, regions, ids, peer_ids, stopped):
        batches = [
            engine.batch_transfer_async_read(
                session,
                [region.address + run.block_id * region.block_bytes],
                [region.peer_address + run.peer_block_id * region.block_bytes],
                [run.count * region.block_bytes],
            )
            for run in contiguous_runs(ids, peer_ids, len(regions))
            for region in regions
        ]
        return len(ids) if all_done(engine, batches) else 0

    fates = [Fate(polls=4), Fate(FAILED, polls=1), Fate(polls=5), Fate(polls=2)]
    with pytest.raises(AssertionError):
        check(read, fates, [1, 5], [2, 7])


# The puller imports vLLM.


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fates", "valid", "skipped", "failed", "asked"),
    [
        ([], 100, 0, [], 1),
        ([], 4, 0, [], 1),
        ([], 3, 0, [7], 1),
        ([], 0, 0, [1, 3, 5, 7], 1),
        ([], 4, 2, [5, 7], 1),
        ([], 1, 2, [1, 3, 5, 7], 1),
        ([Fate(), Fate(), Fate(), Fate(FAILED)], 100, 0, [3, 5, 7], 1),
        # Where nothing arrived, nothing is asked.
        ([Fate(begins=0)], 100, 0, [1, 3, 5, 7], 0),
    ],
)
def test_only_what_arrived_and_the_peer_still_has_counts(
    fates, valid, skipped, failed, asked
):
    with pulling(fates, valid) as (puller, engine, ledger, pull):
        puller.begin(pull(skipped=skipped))
        assert reported(puller) == [("a", failed)]
        assert ledger.asked == [77] * asked
        assert not puller.is_busy()
        engine.assert_quiet()


@pytest.mark.slow
def test_a_peer_that_cannot_be_asked_has_nothing_valid():
    with pulling([]) as (puller, engine, _, pull):
        with serving() as gone:
            pass
        puller.begin(pull(port=gone.port))
        assert reported(puller) == [("a", [1, 3, 5, 7])]
        engine.assert_quiet()


@pytest.mark.slow
def test_nothing_is_read_before_the_fence():
    with pulling([]) as (puller, engine, _, pull):
        fence = threading.Event()
        puller.begin(pull(), fence.wait)
        time.sleep(0.1)
        assert puller.is_busy()
        assert engine.batches == []
        fence.set()
        assert reported(puller) == [("a", [])]


@pytest.mark.slow
def test_nothing_is_read_from_a_peer_with_blocks_of_other_sizes():
    with pulling([]) as (puller, engine, _, pull):
        other = pull()
        other.workers = [WorkerAddress("peer:1", PEER_BASES, BLOCK_BYTES[::-1])]
        puller.begin(other)
        assert reported(puller) == [("a", [1, 3, 5, 7])]
        assert engine.batches == []


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_stuck_pull_holds_up_no_other():
    with pulling([Fate(polls=STUCK)]) as (puller, engine, _, pull):
        puller.begin(pull("stuck"))
        wait_for(lambda: engine.batches)
        puller.begin(pull("b"))
        assert reported(puller) == [("b", [])]
        engine.released.set()
        assert reported(puller) == [("stuck", [])]


@pytest.mark.slow
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
