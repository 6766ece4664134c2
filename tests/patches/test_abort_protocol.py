# SPDX-License-Identifier: Apache-2.0
"""Aborts and failures between Mooncake workers, the patch on both, one or no side."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax import patcher
from kvtax.paths import PATCHES
from tests.patches.mooncake_protocol import CONNECTOR, TIMEOUT_S, Pair, flat, protocol
from tests.patches.test_releases import RELEASES, copy_of
from tests.releases import package_of

RACE = patcher.load_patch(PATCHES / "kv_transfer_abort_race")
SIDES = ("upstream", "patched")


Sources = dict[str, Path]


def make_sources(release: str, patch: patcher.Patch, place: Path) -> Sources:
    """The connector of a release, as it is and patched."""
    found = {}
    for side in SIDES:
        tree = copy_of(patch, package_of(release), place / side)
        if side == "patched":
            patcher.apply(tree, [patch])
        found[side] = tree.root / CONNECTOR
    return found


@pytest.fixture(scope="module", params=RELEASES)
def sources(request, tmp_path_factory) -> Sources:
    return make_sources(request.param, RACE, tmp_path_factory.mktemp("vllm"))


IDS = st.sampled_from(["t", "u"])
COUNTS = st.integers(1, 3)
NUMBERS = st.integers(0, 3)
EVENTS = st.one_of(
    st.tuples(st.just("schedule"), IDS),
    st.tuples(st.just("finish"), NUMBERS, COUNTS),
    st.tuples(st.just("abort"), NUMBERS),
    st.tuples(st.just("abort_unscheduled"), IDS),
    st.tuples(st.just("step")),
    # A pull of no blocks is that of an aborted request.
    st.tuples(st.just("pull"), st.lists(st.tuples(IDS, st.integers(0, 3)), min_size=1)),
    st.tuples(st.just("transfers_fail"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.02, 1, TIMEOUT_S + 1])),
)

TRAFFIC = st.lists(EVENTS, max_size=30).map(lambda events: [*events, ("end",)])


class Traffic:
    """What two schedulers ask of their workers; few transfer ids, used often."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        # Per request of D, the blocks it pulls.
        self.pulls: dict[str, list[int]] = {}
        # Requests of P whose blocks are kept until P's worker reports an end, and ids.
        self.kept: dict[str, str] = {}
        self._scheduled: dict[str, str] = {}
        self._requests = 0
        self._clear()

    def _clear(self) -> None:
        self._to_send: dict[str, tuple[str, list]] = {}
        self._aborted: set[str] = set()

    def run(self, events: list[tuple]) -> Traffic:
        for name, *arguments in events:
            getattr(self, name)(*arguments)
            self.wait(1e-6)
        return self

    def schedule(self, transfer_id: str) -> None:
        self._requests += 1
        request = f"p{self._requests}"
        self._scheduled[request] = transfer_id
        self._to_send[request] = transfer_id, []

    def _take(self, number: int) -> tuple[str, str] | None:
        """A request that an earlier step has scheduled."""
        requests = [r for r in self._scheduled if r not in self._to_send]
        if not requests:
            return None
        request = requests[number % len(requests)]
        return request, self._scheduled.pop(request)

    def finish(self, number: int, count: int) -> None:
        if taken := self._take(number):
            self._to_send[taken[0]] = taken[1], self.pair.blocks(count)
            self.kept[taken[0]] = taken[1]

    def abort(self, number: int) -> None:
        if taken := self._take(number):
            self._aborted.add(taken[1])

    def abort_unscheduled(self, transfer_id: str) -> None:
        self._aborted.add(transfer_id)

    def step(self) -> None:
        to_send, aborted = self._to_send, self._aborted
        self._clear()
        self.pair.step(to_send, aborted)

    def pull(self, wanted: list[tuple[str, int]]) -> None:
        first = len(self.pulls)
        requests = {
            f"d{first + n}": (transfer_id, self.pair.blocks(count))
            for n, (transfer_id, count) in enumerate(wanted)
        }
        self.pulls |= {
            request: flat(blocks) for request, (_, blocks) in requests.items()
        }
        self.pair.pull(requests)

    def transfers_fail(self, fail: bool) -> None:
        self.pair.transfers_fail = fail

    def wait(self, duration_s: float) -> None:
        self.pair.wait(duration_s)

    def end(self) -> None:
        """Abort what runs, and wait until all that can end has ended."""
        while self._scheduled:
            self.step()
            self.abort(0)
        for _ in range(3):
            self.step()
            self.wait(TIMEOUT_S + 61)

    def kept_once(self) -> set[str]:
        """Kept requests whose id no other has: upstream forgets the first of two."""
        ids = list(self.kept.values())
        return {request for request, id in self.kept.items() if ids.count(id) == 1}

    # What D's scheduler makes of it. A pull of no blocks has no request.

    def failed(self) -> set[str]:
        invalid = self.pair.invalid_blocks()
        return {r for r, blocks in self.pulls.items() if not invalid.isdisjoint(blocks)}

    def taken_as_received(self) -> set[str]:
        finished = self.pair.d.finished_recving_reqs - self.failed()
        return {request for request in finished if self.pulls[request]}

    def ended(self) -> set[str]:
        return self.taken_as_received() | self.failed()

    def received(self) -> set[str]:
        return {
            r
            for r in self.taken_as_received()
            if self.pair.memory.keys() >= set(self.pulls[r])
        }


WAITING_BATCH = [
    *[("schedule", "u"), ("step",), ("pull", [("t", 1), ("u", 1)])],
    *[("abort_unscheduled", "t"), ("step",)],
]


def run(sources: Sources, p: str, d: str, events: list[tuple]) -> Traffic:
    with closing(Pair(sources[p], sources[d])) as pair:
        return Traffic(pair).run(events)


def check_all_mixes(sources: Sources, events: list[tuple]) -> None:
    runs = {(p, d): run(sources, p, d, events) for p, d in product(SIDES, SIDES)}
    upstream = runs["upstream", "upstream"]
    for (p, d), traffic in runs.items():
        assert traffic.received() >= upstream.received(), (p, d)
        if p == "patched":
            # Nothing that P has not written is taken as received.
            assert traffic.taken_as_received() == traffic.received(), (p, d)
            # P's blocks come back once, and only what was kept.
            ends = traffic.pair.ended_sends
            assert ends.keys() <= traffic.kept.keys(), (p, d)
            assert set(ends.values()) <= {1}, (p, d)
            assert ends.keys() >= upstream.pair.ended_sends.keys() - {""}, (p, d)
            assert ends.keys() >= traffic.kept_once(), (p, d)


def check_every_pull_ends(sources: Sources, events: list[tuple]) -> None:
    traffic = run(sources, "patched", "patched", events)
    assert traffic.ended() == {r for r, blocks in traffic.pulls.items() if blocks}


def check_answered_at_once(sources: Sources) -> None:
    """An aborted request of a batch, while another is computed."""
    traffic = run(sources, "patched", "patched", WAITING_BATCH)
    assert [a.err_reqs for a in traffic.pair.answers if a.err_reqs] == [["d0"]]
    assert traffic.ended() == ({"d0"} if reports_failed_pulls(sources) else set())
    finish = [("finish", 0, 1), ("end",)]
    traffic = run(sources, "patched", "patched", [*WAITING_BATCH, *finish])
    assert traffic.received() == {"d1"}


def check_all(sources: Sources, events: list[tuple]) -> None:
    check_all_mixes(sources, events)
    if reports_failed_pulls(sources):
        check_every_pull_ends(sources, events)
    check_answered_at_once(sources)


def reports_failed_pulls(sources: Sources) -> bool:
    worker = protocol(sources["patched"]).MooncakeConnectorWorker
    return bool({"fail_pulls", "_handle_failed_recv"} & vars(worker).keys())


@settings(max_examples=50)
@given(TRAFFIC)
def test_with_either_side_unpatched_nothing_gets_worse(sources, events):
    check_all_mixes(sources, events)


@settings(max_examples=50)
@given(TRAFFIC)
def test_every_pull_ends_where_both_sides_are_patched(sources, events):
    if not reports_failed_pulls(sources):
        pytest.skip("this release's decoder does not report a failed pull")
    check_every_pull_ends(sources, events)


def test_an_aborted_request_of_a_batch_is_answered_at_once(sources):
    check_answered_at_once(sources)


@pytest.mark.parametrize(("p", "d"), product(SIDES, SIDES))
@pytest.mark.parametrize("early", [False, True])
def test_an_aborted_id_can_be_used_again(sources, p, d, early):
    """Also by a decoder that is faster than the prefiller."""
    aborted = [("schedule", "t"), ("step",), ("abort", 0), ("step",)]
    if p == "patched":
        aborted += [("abort_unscheduled", "t"), ("step",)]
    send = [("schedule", "t"), ("step",), ("finish", 0, 2), ("step",)]
    pull = [("pull", [("t", 2)])]
    again = [*pull, *send] if early else [*send, *pull]
    traffic = run(sources, p, d, [*aborted, *again, ("wait", 1), ("step",)])
    assert traffic.received() == {"d0"}
    assert traffic.pair.ended_sends == dict.fromkeys(traffic.kept, 1)


# What only this block of the patch puts right.
NEEDS = {
    "forget": WAITING_BATCH,
    "same_id": [
        *[("schedule", "t"), ("schedule", "t"), ("step",), ("abort", 0), ("step",)],
        *[("finish", 0, 1), ("step",)],
    ],
    # The id is in use again before the answer about "u" has left.
    "gone": [
        *[("schedule", "u"), ("step",), ("pull", [("t", 0), ("u", 1)])],
        *[("finish", 0, 1), ("step",), ("abort_unscheduled", "t"), ("step",)],
        *[("schedule", "t"), ("step",), ("wait", 1), ("step",)],
    ],
    "name_failed": WAITING_BATCH,
    "failed_answer": WAITING_BATCH,
}


@pytest.mark.parametrize("block", NEEDS)
def test_each_block_is_needed(sources, block, tmp_path, request):
    events = [*NEEDS[block], ("end",)]
    check_all(sources, events)
    blocks = tuple(each for each in RACE.blocks if each.id != block)
    without = dataclasses.replace(RACE, blocks=blocks)
    release = request.node.callspec.params["sources"]
    if block == "failed_answer" and release != "0.18.1":
        pytest.skip("the block is for 0.18.1")
    with pytest.raises(AssertionError):
        check_all(make_sources(release, without, tmp_path), events)
