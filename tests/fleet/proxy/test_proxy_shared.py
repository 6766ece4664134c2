# SPDX-License-Identifier: Apache-2.0
"""What workers share: loads in rows, sessions' places in slots, and no locks."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.proxy import shared
from fleet.proxy.loads import FleetLoad, InstanceLoad
from fleet.proxy.pins import Pin, Pins
from fleet.proxy.settings import Settings, SettingsError, check
from fleet.proxy.shared import Shared, SharedPins

NAMES = ["a", "b"]
NOTHING = InstanceLoad(0, 0, 0)


def test_each_worker_sees_what_is_in_flight_at_all() -> None:
    common = Shared(3, NAMES)
    first, second, third = (FleetLoad(NAMES, common.loads, n) for n in range(3))
    with first.flight("a", 100) as flight, second.flight("b", 7):
        flight.prefills(60)
        flight.generated(2)
        third.decided(True, False)
        second.decided(True, True)
        totals = third.totals()
        assert totals.instances == [InstanceLoad(1, 102, 60), InstanceLoad(1, 7, 0)]
        assert (totals.arrivals, totals.offloaded) == (2, 1)
        with second.offload("a", 10, 10):
            assert third.offloads == 1
            assert third["a"] == InstanceLoad(2, 112, 70)
    assert third.totals().instances == [NOTHING, NOTHING]


def test_what_a_dead_worker_had_in_flight_goes_with_it() -> None:
    common = Shared(2, NAMES)
    alive, dead = (FleetLoad(NAMES, common.loads, place) for place in range(2))
    common.ports[1] = 1234
    with alive.flight("a", 5):
        dead.flight("a", 100).__enter__()
        assert alive["a"].requests == 2
        common.clear(1)
        assert alive["a"] == InstanceLoad(1, 5, 0)
        assert common.ports.tolist() == [0, 0]


notes = st.tuples(
    st.sampled_from(["s", "t", "u", None]),
    st.sampled_from(NAMES),
    st.integers(0, 2**33),
)


@given(st.lists(notes, max_size=30))
def test_shared_pins_say_what_pins_of_one_process_say(asked) -> None:
    one, several = Pins(), SharedPins(NAMES)
    for session, instance, tokens in asked:
        tokens = min(tokens, 2**32 - 1)
        one.note(session, instance, tokens)
        several.note(session, instance, tokens)
        for name in ("s", "t", "u", None, "never seen"):
            assert several.of(name) == one.of(name)


def test_a_session_is_pinned_for_other_processes_too() -> None:
    pins = SharedPins(NAMES)
    if (child := os.fork()) == 0:
        pins.note("s", "b", 33_000)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pins.of("s") == Pin("b", 1, 33_000)


def test_a_slot_that_two_write_at_once_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "SLOTS", 1)
    mine, others = SharedPins(NAMES), SharedPins(NAMES)
    mine.note("s", "a", 1)
    others.note("t", "b", 2)
    mine._words[0] = others._words[0]
    assert mine.of("s") is None
    assert mine.of("t") is None


def test_a_session_gives_way_to_another_with_the_same_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "SLOTS", 1)
    pins = SharedPins(NAMES)
    pins.note("s", "a", 1)
    pins.note("t", "b", 2)
    assert pins.of("s") is None
    assert pins.of("t") == Pin("b", 1, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings("linear", workers=2), "give --kvindexd"),
        (Settings("elastic", workers=2), "moves KV"),
        (Settings("load_only", workers=0), "at least 1"),
    ],
)
def test_what_workers_cannot_share_is_refused(settings: Settings, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check([], settings)


def test_what_workers_can_share_is_not_refused() -> None:
    check([], Settings("load_only", workers=2))
    check([], Settings("linear", cache="exact", kvindexd="unix:///k", workers=2))
