# SPDX-License-Identifier: Apache-2.0
"""Every policy decides by its stated formula, the same for the same snapshot, and no KV
moves into no room."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax_fleet.paths import FLEET
from kvtax_fleet.policies import POLICIES, PolicyError, parameters_of
from kvtax_fleet.policies.decision import Decision, NoInstance, RequestInfo
from kvtax_fleet.records.decisions import Candidate, Snapshot

MOVES_KV = [name for name in POLICIES if POLICIES[name].moves_kv]
# The reference study's rule sends KV whether there is room or not.
GATED = [name for name in MOVES_KV if parameters_of(name, {}).kv_share is not None]
LMETRICS = [name for name in POLICIES if name.startswith("lmetric")]
BLIND = [name for name in POLICIES if not POLICIES[name].sees_caches]


def candidate(name: str, role: str = "both", **load: int) -> Candidate:
    zeros = dict.fromkeys(
        ("requests", "ongoing_tokens", "pending_prefill_tokens", "cached_tokens"), 0
    )
    return Candidate(name, role, **(zeros | load))


def decide(
    policy: str,
    candidates: list[Candidate],
    prompt_tokens: int = 1000,
    pinned: str | None = None,
    arrivals: int = 0,
    offloads: int = 0,
    offloaded: int = 0,
    **parameters: float,
) -> Decision:
    snapshot = Snapshot(candidates, pinned, arrivals, offloads, offloaded)
    return decided(policy, RequestInfo("s", prompt_tokens), snapshot, **parameters)


def decided(
    policy: str, request: RequestInfo, snapshot: Snapshot, **parameters: float
) -> Decision | None:
    """The decision, None if no instance can take the request."""
    try:
        return POLICIES[policy].decide(
            request, snapshot, parameters_of(policy, parameters)
        )
    except NoInstance:
        return None


loads = st.integers(0, 50_000)
any_role = st.sampled_from(["both", "prefill", "decode"])


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    count = draw(st.integers(1, 9))
    candidates = [
        Candidate(
            f"i{n}",
            draw(any_role),
            *(draw(loads) for _ in range(4)),
            draw(st.none() | st.integers(1_000, 200_000)),
        )
        for n in range(count)
    ]
    names = st.sampled_from([candidate.name for candidate in candidates] + ["gone"])
    pinned = draw(st.none() | names)
    small = st.integers(0, 99), st.integers(0, 3), st.integers(0, 9)
    return Snapshot(candidates, pinned, *map(draw, small))


requests = st.builds(RequestInfo, st.none() | st.just("s"), st.integers(1, 60_000))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(request_info=requests, snapshot=snapshots())
def test_a_decision_is_possible_the_same_again_and_of_the_lowest_score_if_not_pinned(
    policy, request_info, snapshot
):
    roles = {member.name: member.role for member in snapshot.candidates}
    decision = decided(policy, request_info, snapshot)
    if decision is None:
        needed = {"decode"} if policy == "pd_sep" else {"both", "decode"}
        assert not needed & set(roles.values())
        return
    assert roles[decision.instance] != "prefill"
    assert decision.prefill is None or roles[decision.prefill] != "decode"
    assert decision.prefill != decision.instance
    if decision.instance != snapshot.pinned:
        lowest = min(decision.scores.values())
        assert decision.scores[decision.instance] == lowest
    assert decision.instance in decision.scores
    assert decision == decided(policy, request_info, snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("policy", LMETRICS)
@given(request_info=requests, snapshot=snapshots())
def test_lmetric_has_no_affinity(policy, request_info, snapshot):
    free = msgspec.structs.replace(snapshot, pinned=None)
    pinned = decided(policy, request_info, snapshot)
    assert pinned == decided(policy, request_info, free)


@pytest.mark.slow
@pytest.mark.parametrize("policy", BLIND)
@given(request_info=requests, snapshot=snapshots(), cached=st.integers(0, 50_000))
def test_a_policy_blind_to_caches_decides_the_same_whatever_is_cached(
    policy, request_info, snapshot, cached
):
    others = [
        msgspec.structs.replace(member, cached_tokens=cached * place % 7001)
        for place, member in enumerate(snapshot.candidates)
    ]
    elsewhere = msgspec.structs.replace(snapshot, candidates=others)
    decision = decided(policy, request_info, snapshot)
    assert decision == decided(policy, request_info, elsewhere)


def test_round_robin_takes_each_in_turn():
    three = [candidate(name) for name in "abc"]
    turns = [decide("round_robin", three, arrivals=n).instance for n in range(6)]
    assert turns == list("abcabc")


def test_load_only_sees_ongoing_tokens_and_no_cache():
    busy = candidate("busy", ongoing_tokens=10, cached_tokens=999)
    idle = candidate("idle", ongoing_tokens=9, pending_prefill_tokens=9)
    decision = decide("load_only", [busy, idle], pinned="busy")
    assert decision.instance == "idle"
    assert decision.scores == {"busy": 10, "idle": 9}


def test_linear_weighs_cached_tokens_against_load_by_alpha():
    near = candidate("near", ongoing_tokens=500, cached_tokens=400)
    far = candidate("far", ongoing_tokens=200)
    assert decide("linear", [near, far]).scores == {"near": 100, "far": 200}
    assert decide("linear", [near, far]).instance == "near"
    assert decide("linear", [near, far], alpha=0.5).instance == "far"


def test_linear_keeps_a_session_until_its_instance_is_above_twice_the_mean():
    others = [candidate(name, ongoing_tokens=100) for name in "bc"]
    at_limit = [candidate("a", ongoing_tokens=400), *others]
    above = [candidate("a", ongoing_tokens=401), *others]
    assert decide("linear", at_limit, pinned="a").instance == "a"
    assert decide("linear", above, pinned="a").instance == "b"
    assert "override" in decide("linear", above, pinned="a").reason
    assert decide("linear", above, pinned="a", overload=3).instance == "a"


def test_lmetric_multiplies_prefill_work_by_the_batch_it_joins():
    a = candidate("a", pending_prefill_tokens=100, requests=3, cached_tokens=900)
    b = candidate("b", requests=0)
    assert decide("lmetric", [a, b]).scores == {"a": 200 * 4, "b": 1000}
    assert decide("lmetric", [a, b]).instance == "a"


def test_of_idle_instances_the_studys_lmetric_takes_the_first_and_ours_the_cached():
    idle = [candidate("a"), candidate("b", cached_tokens=900), candidate("c")]
    for arrivals in range(3):
        assert decide("lmetric_study", idle, arrivals=arrivals).instance == "a"
        assert decide("lmetric", idle, arrivals=arrivals).instance == "b"
    busy = [candidate("a", requests=1, pending_prefill_tokens=1), *idle[1:]]
    assert decide("lmetric_study", busy).instance == "b"


def test_cache_aware_takes_the_longest_prefix_above_a_share_of_the_prompt():
    busy = candidate("busy", requests=9, cached_tokens=301)
    idle = candidate("idle", cached_tokens=300)
    assert decide("cache_aware", [busy, idle]).instance == "busy"
    assert decide("cache_aware", [busy, idle], prompt_tokens=1004).instance == "idle"
    assert decide("cache_aware", [busy, idle], match_share=0.31).instance == "idle"
    alike = candidate("alike", requests=8, cached_tokens=301)
    assert decide("cache_aware", [busy, alike]).instance == "alike"


def test_cache_aware_leaves_the_cache_where_load_is_uneven_by_both_limits():
    def chosen(busy: int, idle: int) -> str:
        cached = candidate("busy", requests=busy, cached_tokens=1000)
        return decide(
            "cache_aware", [cached, candidate("idle", requests=idle)]
        ).instance

    assert chosen(busy=64, idle=0) == "busy"
    assert chosen(busy=65, idle=0) == "idle"
    # 65 more, but not one and a half times as many.
    assert chosen(busy=195, idle=130) == "busy"


def test_llm_d_goes_by_the_queue_and_the_kv_of_the_metrics():
    a = candidate("a", requests=9, waiting=0, kv_used=0.5, kv_tokens=100)
    b = candidate("b", requests=1, waiting=3, kv_used=0.25)
    decision = decide("llm_d", [a, b])
    assert decision.scores == pytest.approx({"a": -(2 + 2 * 0.5), "b": -(2 * 0.75)})
    assert decision.instance == "a"


def test_unified_keeps_to_a_long_prefix_and_else_goes_by_prefill_times_requests():
    loaded = candidate("loaded", requests=9, cached_tokens=501)
    idle = candidate("idle", pending_prefill_tokens=7)
    busy = candidate("busy", requests=2, pending_prefill_tokens=7)
    assert decide("unified", [busy, idle, loaded]).instance == "loaded"
    less = msgspec.structs.replace(loaded, cached_tokens=500)
    decision = decide("unified", [busy, idle, less])
    assert decision.scores == {"busy": 2 * 1007, "idle": 0, "loaded": 9 * 500}
    assert decision.instance == "idle"


def test_a_tie_goes_to_fewer_requests_then_fewer_tokens_then_in_turn():
    # All of the prompt is cached, nothing pends: all score 0.
    full = {"cached_tokens": 1000}
    a = candidate("a", requests=2, **full)
    b = candidate("b", requests=1, ongoing_tokens=7, **full)
    c = candidate("c", requests=1, ongoing_tokens=6, **full)
    assert decide("lmetric", [a, b, c]).instance == "c"
    same = [candidate(name, **full) for name in "abc"]
    turns = [decide("lmetric", same, arrivals=n).instance for n in range(4)]
    assert turns == list("abca")


def test_pd_sep_takes_the_least_of_each_pool():
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
def test_elastic_tells_by_new_tokens_and_offloads_the_heavy(new_tokens, kind):
    a = candidate("a", cached_tokens=10_000)
    decision = decide("elastic", [a, candidate("b")], new_tokens + 10_000, "a")
    assert (decision.instance, decision.kind) == ("a", kind)
    assert decision.prefill == ("b" if kind in ("HEAVY", "HUGE") else None)


def test_elastic_does_not_offload_above_the_cap_or_to_an_overloaded_instance():
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


def test_elastic_offloads_to_prefill_instances_alone_where_there_are_any():
    idle, pool = candidate("idle"), candidate("pool", role="prefill", requests=3)
    here = candidate("here", ongoing_tokens=1)
    chosen = decide("elastic", [idle, here, pool], prompt_tokens=30_000, pinned="here")
    assert (chosen.instance, chosen.prefill) == ("here", "pool")
    without = decide("elastic", [idle, here], prompt_tokens=30_000, pinned="here")
    assert without.prefill == "idle"


def test_parameters_are_checked_and_said_as_text_or_numbers():
    assert parameters_of("linear", {"alpha": "0.5"}).alpha == 0.5
    assert parameters_of("elastic", {"max_offloads": 7}).max_offloads == 7
    for policy, given_, said in (
        ("nearest", {}, "there are round_robin"),
        ("linear", {"beta": "1"}, "parameters: alpha, overload"),
        ("linear", {"alpha": "much"}, "alpha"),
        ("linear", {"alpha": "nan"}, "nan is not finite"),
    ):
        with pytest.raises(PolicyError, match=said):
            parameters_of(policy, given_)


def test_elastic_study_has_the_studys_constants_and_takes_prefill_in_turn():
    others = [candidate(name, pending_prefill_tokens=9) for name in "bc"]
    idle = [candidate("a"), *others, candidate("d")]
    heavy = {"prompt_tokens": 30_000, "pinned": "a", "offloads": 3}
    chosen = [decide("elastic_study", idle, offloaded=n, **heavy) for n in range(4)]
    assert [decision.prefill for decision in chosen] == ["b", "c", "d", "b"]
    assert {decision.prefill_timeout_s for decision in chosen} == {120}
    assert decide("elastic_study", idle, **heavy | {"offloads": 4}).prefill is None
    full = [idle[0], candidate("b", pending_prefill_tokens=30_001), *idle[2:]]
    assert decide("elastic_skip", full, **heavy).prefill == "c"
    stays = decide("elastic_study", full, **heavy)
    assert (stays.prefill, stays.reason) == (None, "b is overloaded: not offloaded")
    assert decide("elastic_skip", full[:2], **heavy).prefill is None
    # Ours takes the one with the least to prefill, and the proxy's limit.
    ours = decide("elastic", idle, **heavy | {"offloads": 0})
    assert (ours.prefill, ours.prefill_timeout_s) == ("d", None)


def moves_kv(policy: str, kv_tokens: int | None, in_flight: int) -> bool:
    """Whether 30,000 tokens of KV may come to the one instance that would take them."""
    target = {"kv_tokens": kv_tokens, "ongoing_tokens": in_flight}
    if policy == "pd_sep":
        pools = [candidate("p", "prefill"), candidate("d", "decode", **target)]
        return decide(policy, pools, 30_000).prefill is not None
    pair = [candidate("a", **target), candidate("b")]
    return decide(policy, pair, 30_000, "a").prefill is not None


def test_only_the_studys_rule_sends_kv_where_it_has_no_room():
    assert set(MOVES_KV) - set(GATED) == {"elastic_skip"}
    assert moves_kv("elastic_skip", 100_000, 60_001)


@pytest.mark.parametrize("policy", GATED)
def test_kv_moves_only_to_where_it_fits_beside_all_that_is_in_flight(
    policy,
):
    assert moves_kv(policy, 100_000, 60_000)
    assert not moves_kv(policy, 100_000, 60_001)
    assert moves_kv(policy, None, 60_001)


@pytest.mark.slow
@given(request_info=requests, snapshot=snapshots(), policy=st.sampled_from(GATED))
def test_whatever_the_load_no_kv_moves_to_where_it_does_not_fit(
    request_info, snapshot, policy
):
    """So all that pull at an instance fit at once: none waits for another's blocks."""
    decision = decided(policy, request_info, snapshot)
    if decision is None or decision.prefill is None:
        return
    (there,) = (c for c in snapshot.candidates if c.name == decision.instance)
    if there.kv_tokens is not None:
        in_flight = there.ongoing_tokens + request_info.prompt_tokens
        assert in_flight <= 0.9 * there.kv_tokens


def test_pd_sep_decodes_where_there_is_room():
    full = candidate("d1", "decode", ongoing_tokens=5, kv_tokens=1_000)
    free = candidate("d2", "decode", ongoing_tokens=9)
    prefill = candidate("p", "prefill")
    decision = decide("pd_sep", [prefill, full, free], 1_000)
    assert (decision.instance, decision.prefill) == ("d2", "p")
    decision = decide("pd_sep", [prefill, full], 1_000)
    assert (decision.instance, decision.prefill) == ("d1", None)
    assert decision.reason == "no room for KV to arrive: co-located"


def test_the_proxys_page_lists_each_policy_with_its_parameters():
    page = (FLEET / "docs/proxy.md").read_text()
    section = page[page.index("## Policies") : page.index("## What is cached")]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)", section, re.MULTILINE))
    assert rows.keys() == POLICIES.keys()
    for name in ("dynamo", "linear", "cache_aware", "unified"):
        shown = set(re.findall(r"`(\w+)` \(", rows[name]))
        assert shown == set(POLICIES[name].parameters.__struct_fields__)
