# SPDX-License-Identifier: Apache-2.0
"""Every policy decides by its stated formula, the same for the same snapshot."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import asks, candidate, decide, snapshots

from fleet.policies import (
    BLIND_TO_CACHES,
    POLICIES,
    Ask,
    Candidate,
    NoInstance,
    PolicyError,
    Snapshot,
    parameters_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(ask=asks, snapshot=snapshots())
def test_a_decision_names_instances_that_are_there_and_may_do_it(
    policy: str, ask: Ask, snapshot: Snapshot
) -> None:
    roles = {one.name: one.role for one in snapshot.candidates}
    parameters = parameters_of(policy, {})
    try:
        decision = POLICIES[policy](ask, snapshot, parameters)
    except NoInstance:
        needed = {"decode"} if policy == "pd_sep" else {"both", "decode"}
        assert not needed & set(roles.values())
        return
    assert roles[decision.instance] != "prefill"
    assert decision.instance in decision.scores
    assert decision.prefill is None or roles[decision.prefill] != "decode"
    assert decision.prefill != decision.instance
    assert decision.read_from is None or decision.read_from in roles
    assert decision.read_from != decision.instance
    assert decision == POLICIES[policy](ask, snapshot, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(ask=asks, snapshot=snapshots())
def test_the_lowest_score_wins_unless_the_session_is_pinned(
    policy: str, ask: Ask, snapshot: Snapshot
) -> None:
    try:
        decision = POLICIES[policy](ask, snapshot, parameters_of(policy, {}))
    except NoInstance:
        return
    if decision.instance != snapshot.pinned:
        lowest = min(decision.scores.values())
        assert decision.scores[decision.instance] == lowest


@given(ask=asks, snapshot=snapshots())
def test_lmetric_has_no_affinity(ask: Ask, snapshot: Snapshot) -> None:
    free = msgspec.structs.replace(snapshot, pinned=None)
    parameters = parameters_of("lmetric", {})
    try:
        pinned = POLICIES["lmetric"](ask, snapshot, parameters)
    except NoInstance:
        return
    assert pinned == POLICIES["lmetric"](ask, free, parameters)


@pytest.mark.parametrize("policy", sorted(BLIND_TO_CACHES))
@given(ask=asks, snapshot=snapshots(), cached=st.integers(0, 50_000))
def test_who_is_blind_to_caches_decides_the_same_whatever_is_cached(
    policy: str, ask: Ask, snapshot: Snapshot, cached: int
) -> None:
    others = [
        msgspec.structs.replace(one, cached_tokens=cached * place % 7001)
        for place, one in enumerate(snapshot.candidates)
    ]
    elsewhere = msgspec.structs.replace(snapshot, candidates=others)
    parameters = parameters_of(policy, {})
    try:
        decision = POLICIES[policy](ask, snapshot, parameters)
    except NoInstance:
        return
    assert decision == POLICIES[policy](ask, elsewhere, parameters)


def test_round_robin_takes_each_in_turn() -> None:
    three = [candidate(name) for name in "abc"]
    turns = [decide("round_robin", three, arrivals=n).instance for n in range(6)]
    assert turns == list("abcabc")


def test_load_only_sees_ongoing_tokens_and_no_cache() -> None:
    busy = candidate("busy", ongoing_tokens=10, cached_tokens=999)
    idle = candidate("idle", ongoing_tokens=9, pending_prefill_tokens=9)
    decision = decide("load_only", [busy, idle], pinned="busy")
    assert decision.instance == "idle"
    assert decision.scores == {"busy": 10, "idle": 9}


def test_linear_weighs_cached_tokens_against_load_by_alpha() -> None:
    near = candidate("near", ongoing_tokens=500, cached_tokens=400)
    far = candidate("far", ongoing_tokens=200)
    assert decide("linear", [near, far]).scores == {"near": 100, "far": 200}
    assert decide("linear", [near, far]).instance == "near"
    assert decide("linear", [near, far], alpha=0.5).instance == "far"


def test_linear_keeps_a_session_until_its_instance_is_above_twice_the_mean() -> None:
    others = [candidate(name, ongoing_tokens=100) for name in "bc"]
    at_limit = [candidate("a", ongoing_tokens=400), *others]
    above = [candidate("a", ongoing_tokens=401), *others]
    assert decide("linear", at_limit, pinned="a").instance == "a"
    assert decide("linear", above, pinned="a").instance == "b"
    assert "override" in decide("linear", above, pinned="a").reason
    assert decide("linear", above, pinned="a", overload=3).instance == "a"


def test_lmetric_multiplies_prefill_work_by_the_batch_it_joins() -> None:
    a = candidate("a", pending_prefill_tokens=100, requests=3, cached_tokens=900)
    b = candidate("b", requests=0)
    assert decide("lmetric", [a, b]).scores == {"a": 200 * 4, "b": 1000}
    assert decide("lmetric", [a, b]).instance == "a"


def test_cache_aware_takes_the_longest_prefix_above_a_share_of_the_prompt() -> None:
    busy = candidate("busy", requests=9, cached_tokens=301)
    idle = candidate("idle", cached_tokens=300)
    assert decide("cache_aware", [busy, idle]).instance == "busy"
    assert decide("cache_aware", [busy, idle], prompt_tokens=1004).instance == "idle"
    assert decide("cache_aware", [busy, idle], match_share=0.31).instance == "idle"
    alike = candidate("alike", requests=8, cached_tokens=301)
    assert decide("cache_aware", [busy, alike]).instance == "alike"


def test_cache_aware_leaves_the_cache_where_load_is_uneven_by_both_limits() -> None:
    def chosen(busy: int, idle: int) -> str:
        cached = candidate("busy", requests=busy, cached_tokens=1000)
        return decide(
            "cache_aware", [cached, candidate("idle", requests=idle)]
        ).instance

    assert chosen(busy=64, idle=0) == "busy"
    assert chosen(busy=65, idle=0) == "idle"
    # 65 more, but not one and a half times as many.
    assert chosen(busy=195, idle=130) == "busy"


def test_weighted_adds_up_what_is_cached_the_queue_and_free_kv() -> None:
    a = candidate("a", requests=4, cached_tokens=500, ongoing_tokens=30, kv_tokens=100)
    b = candidate("b", requests=1)
    c = candidate("c", requests=2, cached_tokens=9999)
    decision = decide("weighted", [a, b, c])
    assert decision.scores == pytest.approx(
        {
            "a": -(3 * 0.5 + 2 * 0 + 2 * 0.7),
            "b": -(3 * 0 + 2 * 1 + 2 * 1),
            "c": -(3 * 1 + 2 * 2 / 3 + 2 * 1),
        }
    )
    assert decision.instance == "c"
    assert decide("weighted", [a, b, c], prefix=0).instance == "b"


@given(session=st.text(), count=st.integers(2, 9), gone=st.integers(0, 8))
def test_session_hash_moves_only_the_sessions_of_the_instance_that_goes(
    session: str, count: int, gone: int
) -> None:
    every = [candidate(f"i{n}") for n in range(count)]
    left = [one for n, one in enumerate(every) if n != gone % count]

    def chosen(candidates: list[Candidate]) -> str:
        snapshot = Snapshot(candidates, None, 0, 0)
        parameters = parameters_of("session_hash", {})
        ask = Ask(session, 1000)
        return POLICIES["session_hash"](ask, snapshot, parameters).instance

    if chosen(every) in [one.name for one in left]:
        assert chosen(left) == chosen(every)


def test_session_hash_spreads_sessions_and_requests_without_one() -> None:
    four = [candidate(name) for name in "abcd"]
    for asked in (
        [Ask(f"session {n}", 1000) for n in range(400)],
        [Ask(None, 1000)] * 400,
    ):
        counts = Counter(
            POLICIES["session_hash"](
                ask, Snapshot(four, None, n, 0), parameters_of("session_hash", {})
            ).instance
            for n, ask in enumerate(asked)
        )
        # 100 each; the deviation is 8.7.
        assert all(65 <= counts[name] <= 135 for name in "abcd")


def test_a_tie_goes_to_fewer_requests_then_fewer_tokens_then_in_turn() -> None:
    # All of the prompt is cached, nothing pends: all score 0.
    full = {"cached_tokens": 1000}
    a = candidate("a", requests=2, **full)
    b = candidate("b", requests=1, ongoing_tokens=7, **full)
    c = candidate("c", requests=1, ongoing_tokens=6, **full)
    assert decide("lmetric", [a, b, c]).instance == "c"
    same = [candidate(name, **full) for name in "abc"]
    turns = [decide("lmetric", same, arrivals=n).instance for n in range(4)]
    assert turns == list("abca")


def test_pd_sep_takes_the_least_of_each_pool() -> None:
    pools = [
        candidate("p1", "prefill", pending_prefill_tokens=600),
        candidate("p2", "prefill", pending_prefill_tokens=500),
        candidate("d1", "decode", ongoing_tokens=20),
        candidate("d2", "decode", ongoing_tokens=30),
    ]
    decision = decide("pd_sep", pools)
    assert (decision.prefill, decision.instance) == ("p2", "d1")
    cached = candidate("p1", "prefill", pending_prefill_tokens=600, cached_tokens=101)
    assert decide("pd_sep", [cached, *pools[1:]]).prefill == "p1"
    assert decide("pd_sep", pools[2:]).prefill is None


@pytest.mark.parametrize(
    ("new_tokens", "kind"),
    [
        (4_999, "WARM"),
        (5_000, "MEDIUM"),
        (20_000, "MEDIUM"),
        (20_001, "HEAVY"),
        (50_000, "HEAVY"),
        (50_001, "HUGE"),
    ],
)
def test_elastic_tells_by_new_tokens_and_offloads_the_heavy(
    new_tokens: int, kind: str
) -> None:
    a = candidate("a", cached_tokens=10_000)
    decision = decide("elastic", [a, candidate("b")], new_tokens + 10_000, "a")
    assert (decision.instance, decision.kind) == ("a", kind)
    assert decision.prefill == ("b" if kind in ("HEAVY", "HUGE") else None)


def test_elastic_does_not_offload_above_the_cap_or_to_an_overloaded_instance() -> None:
    a, b = candidate("a"), candidate("b")
    heavy = {"prompt_tokens": 30_000, "pinned": "a"}
    assert decide("elastic", [a, b], offloads=1, **heavy).prefill == "b"
    assert decide("elastic", [a, b], offloads=2, **heavy).prefill is None
    full = candidate("b", pending_prefill_tokens=30_001)
    skipped = decide("elastic", [a, full], **heavy)
    assert skipped.prefill is None
    assert skipped.reason == "b is overloaded: not offloaded"
    assert skipped.kind == "HEAVY"
    assert decide("elastic", [a], **heavy).prefill is None


def test_direct_read_names_the_peer_with_the_longest_prefix() -> None:
    here = candidate("here", cached_tokens=100)
    some = candidate("some", cached_tokens=650)
    most = candidate("most", cached_tokens=700)
    chosen = {"pinned": "here", "prompt_tokens": 1000}
    assert decide("direct_read", [here, some, most], **chosen).read_from == "most"
    little = [here, candidate("b", cached_tokens=611)]
    assert decide("direct_read", little, **chosen).read_from is None
    assert decide("direct_read", little, min_gain_tokens=9, **chosen).read_from == "b"


def test_parameters_are_checked_and_said_as_text_or_numbers() -> None:
    assert parameters_of("linear", {"alpha": "0.5"}).alpha == 0.5
    assert parameters_of("elastic", {"max_offloads": 7}).max_offloads == 7
    for policy, given_, said in (
        ("nearest", {}, "there are round_robin"),
        ("linear", {"beta": "1"}, "parameters: alpha, overload"),
        ("linear", {"alpha": "much"}, "alpha"),
    ):
        with pytest.raises(PolicyError, match=said):
            parameters_of(policy, given_)
