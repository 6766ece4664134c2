# SPDX-License-Identifier: Apache-2.0
"""Policies that move KV between instances."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtax_fleet.policies.decision import (
    HEAVY_ABOVE_TOKENS,
    HUGE_ABOVE_TOKENS,
    WARM_BELOW_TOKENS,
    Decision,
    NoInstance,
    Parameters,
    Policy,
    RequestInfo,
    has_room,
    least,
    lowest,
    new_tokens,
)
from kvtax_fleet.policies.placement import LinearParameters, decide_linear
from kvtax_fleet.records.decisions import Candidate, Snapshot


class PdSepParameters(Parameters, frozen=True):
    """Limits of a transfer, as in elastic."""

    prefill_timeout_s: float | None = None
    kv_share: float = 0.9


def decide_pd_sep(
    request: RequestInfo, snapshot: Snapshot, parameters: PdSepParameters
) -> Decision:
    """Prefill every prompt in one fixed pool and decode in the other.

    Decode: the instance of role `decode` with the fewest ongoing tokens. Prefill: that
    of role `prefill` with the fewest tokens to compute before ours are done, its
    pending prefill tokens + the request's new tokens there. Without a healthy prefill
    instance, or where no decode instance has room for the KV to arrive, the decode
    instance does both. DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677)
    are where the pools come from. Raises NoInstance without a decode instance.
    """
    decode = [
        candidate for candidate in snapshot.candidates if candidate.role == "decode"
    ]
    prefill = [
        candidate for candidate in snapshot.candidates if candidate.role == "prefill"
    ]
    if not decode:
        raise NoInstance("no healthy instance of role decode")
    with_room = [
        candidate
        for candidate in decode
        if has_room(request, candidate, parameters.kv_share)
    ]
    pool = with_room or decode
    scores = [float(candidate.ongoing_tokens) for candidate in pool]
    reason = "least load of each pool"
    if not prefill:
        reason = "no healthy prefill instance: co-located"
    elif not with_room:
        reason = "no room for KV to arrive: co-located"
    decision = least(pool, scores, snapshot, reason)
    if not (prefill and with_room):
        return decision
    source = _least_prefill(request, prefill, snapshot)
    return msgspec.structs.replace(
        decision, prefill=source.name, prefill_timeout_s=parameters.prefill_timeout_s
    )


def _least_prefill(
    request: RequestInfo, pool: list[Candidate], snapshot: Snapshot
) -> Candidate:
    work = [
        float(candidate.pending_prefill_tokens + new_tokens(request, candidate))
        for candidate in pool
    ]
    return pool[lowest(pool, work, snapshot.arrivals)]


class ElasticParameters(LinearParameters, frozen=True):
    """linear's parameters; limits in new tokens; the most offloads under way; what
    happens where the instance in turn is overloaded; the share of an instance's KV that
    may be in flight for more to arrive, None for any.
    """

    warm_tokens: int = WARM_BELOW_TOKENS
    heavy_tokens: int = HEAVY_ABOVE_TOKENS
    max_offloads: int = 2
    prefill_on: Literal["least_prefill", "in_turn"] = "least_prefill"
    overloaded: Literal["stay", "skip"] = "stay"
    prefill_timeout_s: float | None = None
    kv_share: float | None = 0.9


class ElasticStudyParameters(ElasticParameters, frozen=True):
    """elastic's parameters with the constants of the reference study: four offloads
    under way (it had eight instances), prefill in turn, 120 s for a prefill.
    """

    max_offloads: int = 4
    prefill_on: Literal["least_prefill", "in_turn"] = "in_turn"
    prefill_timeout_s: float | None = 120.0


class ElasticSkipParameters(ElasticStudyParameters, frozen=True):
    """elastic_study's, and the study's rule: past overloaded instances, and KV sent
    whether there is room for it or not.
    """

    overloaded: Literal["stay", "skip"] = "skip"
    kv_share: float | None = None


def decide_elastic(
    request: RequestInfo, snapshot: Snapshot, parameters: ElasticParameters
) -> Decision:
    """Place like linear, but prefill a heavy prompt on another instance.

    With new = prompt tokens - cached tokens at the instance that linear chooses: WARM
    below `warm_tokens`, MEDIUM up to `heavy_tokens`, HEAVY above (HUGE above 50,000).
    WARM and MEDIUM prefill where they decode. A HEAVY or HUGE prompt prefills on
    another instance, and its KV moves: by `prefill_on` the one with the fewest pending
    prefill tokens + new tokens there, or the next in turn, among those of role
    `prefill` where the fleet has any. It stays where it decodes if
    `max_offloads` are under way, if there is no room for its KV to arrive, or if that
    other instance is overloaded: more prefill tokens pending there than here, new ones
    included. By `overloaded` the next one is taken then, if any is not.
    """
    chosen = decide_linear(request, snapshot, parameters)
    here = _candidate(snapshot.candidates, chosen.instance)
    new = new_tokens(request, here)
    if new < parameters.warm_tokens:
        return msgspec.structs.replace(chosen, kind="WARM")
    if new <= parameters.heavy_tokens:
        return msgspec.structs.replace(chosen, kind="MEDIUM")

    kind = "HUGE" if new > max(parameters.heavy_tokens, HUGE_ABOVE_TOKENS) else "HEAVY"

    def co_located(why: str) -> Decision:
        return msgspec.structs.replace(
            chosen, kind=kind, reason=f"{why}: not offloaded"
        )

    others = [candidate for candidate in _prefilling(snapshot) if candidate is not here]
    if not others:
        return co_located("no other prefill instance")
    if snapshot.offloads >= parameters.max_offloads:
        return co_located(f"{snapshot.offloads} offloads under way")
    if not has_room(request, here, parameters.kv_share):
        return co_located(f"{here.name} has no room for KV to arrive")
    limit = here.pending_prefill_tokens + new
    free = [other for other in others if other.pending_prefill_tokens <= limit]
    if parameters.prefill_on == "least_prefill":
        source = _least_prefill(request, others, snapshot)
    else:
        turn = snapshot.offloaded % len(others)
        in_turn = others[turn:] + others[:turn]
        source = in_turn[0]
        if parameters.overloaded == "skip":
            source = next((other for other in in_turn if other in free), source)
    if source not in free:
        return co_located(f"{source.name} is overloaded")
    return msgspec.structs.replace(
        chosen,
        kind=kind,
        prefill=source.name,
        reason="heavy: offloaded",
        prefill_timeout_s=parameters.prefill_timeout_s,
    )


def _prefilling(snapshot: Snapshot) -> list[Candidate]:
    """List the instances that prefill for others: those of role prefill, if any."""
    able = [
        candidate for candidate in snapshot.candidates if candidate.role != "decode"
    ]
    return [candidate for candidate in able if candidate.role == "prefill"] or able


def _candidate(candidates: list[Candidate], name: str) -> Candidate:
    return next(candidate for candidate in candidates if candidate.name == name)


POLICIES = {
    "pd_sep": Policy(decide_pd_sep, PdSepParameters, moves_kv=True, needs_pools=True),
    "elastic": Policy(decide_elastic, ElasticParameters, moves_kv=True),
    "elastic_study": Policy(decide_elastic, ElasticStudyParameters, moves_kv=True),
    "elastic_skip": Policy(decide_elastic, ElasticSkipParameters, moves_kv=True),
}
