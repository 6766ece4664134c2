# SPDX-License-Identifier: Apache-2.0
"""Policies that move KV between instances: when, from where, and never into no room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import asks, candidate, decide, snapshots

from fleet.policies import (
    MOVES_KV,
    POLICIES,
    Ask,
    NoInstance,
    Snapshot,
    parameters_of,
)


def test_elastic_study_has_the_studys_constants_and_takes_prefill_in_turn() -> None:
    others = [candidate(name, pending_prefill_tokens=9) for name in "bc"]
    idle = [candidate("a"), *others, candidate("d")]
    heavy = {"prompt_tokens": 30_000, "pinned": "a", "offloads": 3}
    chosen = [decide("elastic_study", idle, offloaded=n, **heavy) for n in range(4)]
    assert [one.prefill for one in chosen] == ["b", "c", "d", "b"]
    assert {one.prefill_timeout_s for one in chosen} == {120}
    assert decide("elastic_study", idle, **heavy | {"offloads": 4}).prefill is None
    # Ours takes the one with the least to prefill, and the proxy's limit.
    ours = decide("elastic", idle, **heavy | {"offloads": 0})
    assert (ours.prefill, ours.prefill_timeout_s) == ("d", None)


def moves_kv(policy: str, kv_tokens: int | None, in_flight: int) -> bool:
    """Whether 30,000 tokens of KV may come to the one instance that would take them."""
    target = {"kv_tokens": kv_tokens, "ongoing_tokens": in_flight}
    if policy == "pd_sep":
        pools = [candidate("p", "prefill"), candidate("d", "decode", **target)]
        return decide(policy, pools, 30_000).prefill is not None
    if policy == "migrate":
        busy = candidate("a", ongoing_tokens=in_flight + 1)
        pair = [busy, candidate("b", **target)]
        turns = {"pinned": "a", "pinned_turns": 10}
        return decide(policy, pair, 30_000, **turns).prefill is not None
    pair = [candidate("a", **target), candidate("b")]
    return decide(policy, pair, 30_000, "a").prefill is not None


@pytest.mark.parametrize("policy", sorted(MOVES_KV))
def test_kv_moves_only_to_where_it_fits_beside_all_that_is_in_flight(
    policy: str,
) -> None:
    assert moves_kv(policy, 100_000, 60_000)
    assert not moves_kv(policy, 100_000, 60_001)
    assert moves_kv(policy, None, 60_001)


@given(ask=asks, snapshot=snapshots(), policy=st.sampled_from(sorted(MOVES_KV)))
def test_whatever_the_load_no_kv_moves_to_where_it_does_not_fit(
    ask: Ask, snapshot: Snapshot, policy: str
) -> None:
    """So all that pull at an instance fit at once: none waits for another's blocks."""
    try:
        decision = POLICIES[policy](ask, snapshot, parameters_of(policy, {}))
    except NoInstance:
        return
    (there,) = (c for c in snapshot.candidates if c.name == decision.instance)
    if decision.prefill is not None and there.kv_tokens is not None:
        assert there.ongoing_tokens + ask.prompt_tokens <= 0.9 * there.kv_tokens


def test_pd_sep_decodes_where_there_is_room() -> None:
    full = candidate("d1", "decode", ongoing_tokens=5, kv_tokens=1_000)
    free = candidate("d2", "decode", ongoing_tokens=9)
    prefill = candidate("p", "prefill")
    found = decide("pd_sep", [prefill, full, free], 1_000)
    assert (found.instance, found.prefill) == ("d2", "p")
    found = decide("pd_sep", [prefill, full], 1_000)
    assert (found.instance, found.prefill) == ("d1", None)
    assert found.reason == "no room for KV to arrive: co-located"


GROWN = {"pinned": "a", "pinned_at_tokens": 10_000}
LEAVES = {
    "turns": {"pinned": "a", "pinned_turns": 10, "prompt_tokens": 10_000},
    "growth": GROWN | {"prompt_tokens": 30_000},
}


@pytest.mark.parametrize("why", LEAVES)
def test_a_session_that_is_due_moves_to_the_least_loaded_with_its_kv(why: str) -> None:
    busy = candidate("a", ongoing_tokens=900, cached_tokens=9_000)
    fleet = [busy, candidate("b", ongoing_tokens=300), candidate("c")]
    decision = decide("migrate", fleet, overload=9, **LEAVES[why])
    assert (decision.instance, decision.prefill) == ("c", "a")
    assert decision.moves_from == "a"
    assert decision.scores == {"a": 900, "b": 300, "c": 0}
    assert decision.reason.endswith(": moved")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pinned_turns": 9, "prompt_tokens": 10_000}, "pinned"),
        ({"pinned_turns": 0, "prompt_tokens": 29_999}, "pinned"),
        ({"every_turns": 0, "grown_tokens": 0}, "pinned"),
        # An older log does not say what its sessions had grown from.
        ({"pinned_turns": 0, "pinned_at_tokens": None}, "pinned"),
        ({"offloads": 2}, "pinned: 10 turns there, but 2 offloads under way"),
    ],
)
def test_a_session_that_is_not_due_stays(change: dict, says: str) -> None:
    fleet = [candidate("a", ongoing_tokens=900), candidate("b")]
    due = GROWN | {"pinned_turns": 10, "prompt_tokens": 30_000}
    decision = decide("migrate", fleet, overload=9, **due | change)
    assert (decision.instance, decision.prefill) == ("a", None)
    assert decision.moves_from is None
    assert decision.reason == says


def test_a_session_stays_where_nobody_has_less_to_do() -> None:
    due = {"pinned": "a", "pinned_turns": 10, "overload": 9}
    even = [candidate(name, ongoing_tokens=900) for name in "ab"]
    decision = decide("migrate", even, **due)
    assert (decision.instance, decision.moves_from) == ("a", None)
    assert "nobody has less to do" in decision.reason
    # It cannot prefill what it would send.
    decodes = [candidate("a", "decode", ongoing_tokens=900), candidate("b")]
    assert decide("migrate", decodes, **due).moves_from is None


def test_a_new_session_and_an_overload_are_linears() -> None:
    fleet = [candidate("a", ongoing_tokens=900), candidate("b"), candidate("c")]
    due = {"pinned_turns": 10, "pinned_at_tokens": 0, "prompt_tokens": 30_000}
    assert decide("migrate", fleet, **due) == decide("linear", fleet, **due)
    pinned = due | {"pinned": "a"}
    assert decide("migrate", fleet, **pinned) == decide("linear", fleet, **pinned)
