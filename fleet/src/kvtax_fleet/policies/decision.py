# SPDX-License-Identifier: Apache-2.0
"""Arguments and result of a policy: plain values, no clock, no I/O.

A policy is a function (request, snapshot, parameters) -> Decision. Equal arguments give
equal decisions, so a recorded snapshot can be decided again by any policy.

Size classes: requests by the prompt tokens that have to be computed. The limits are
those of the reference study, so that its classes and ours hold the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from kvtax_fleet.records.decisions import Candidate, Snapshot

SizeClass = Literal["WARM", "MEDIUM", "HEAVY", "HUGE"]
CLASSES: tuple[SizeClass, ...] = get_args(SizeClass)

# New tokens: WARM below the first limit, MEDIUM to the second, HEAVY to the third.
WARM_BELOW_TOKENS = 5_000
HEAVY_ABOVE_TOKENS = 20_000
HUGE_ABOVE_TOKENS = 50_000

LIMITS = (
    f"WARM below {WARM_BELOW_TOKENS:,}, MEDIUM to {HEAVY_ABOVE_TOKENS:,}, HEAVY to "
    f"{HUGE_ABOVE_TOKENS:,}, HUGE above"
)


class RequestInfo(msgspec.Struct, frozen=True):
    """The properties of a request by which policies decide."""

    session: str | None
    prompt_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """Instance that a request goes to.

    `prefill`: prefill there first; the KV then moves to `instance`. `scores`: of every
    candidate that could have been `instance`; lower is better. `kind`: WARM to HUGE,
    where the policy tells them apart. `prefill_timeout_s`: for the prefill elsewhere;
    None is the proxy's.
    """

    instance: str
    prefill: str | None
    scores: dict[str, float]
    reason: str
    kind: str | None = None
    prefill_timeout_s: float | None = None


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a policy; none unless a subclass adds fields."""


class Policy(NamedTuple):
    """A routing policy, and what it needs of a fleet.

    `moves_kv`: its decisions may move KV between instances. `needs_pools`: instances of
    role prefill and of role decode. `sees_caches`: its decisions depend on what is
    cached where. `reads_gauges`: they depend on the instances' metrics.
    """

    decide: Callable[[RequestInfo, Snapshot, Any], Decision]
    parameters: type[Parameters]
    moves_kv: bool = False
    needs_pools: bool = False
    sees_caches: bool = True
    reads_gauges: bool = False


class NoInstance(Exception):
    """No healthy instance has the role that the policy needs."""


def serving(snapshot: Snapshot) -> list[Candidate]:
    """Return the candidates that may answer requests: not pure prefill instances.

    Raises NoInstance.
    """
    candidates = [
        candidate for candidate in snapshot.candidates if candidate.role != "prefill"
    ]
    if not candidates:
        raise NoInstance("no healthy instance that decodes")
    return candidates


def new_tokens(request: RequestInfo, candidate: Candidate) -> int:
    """Return the prompt tokens that the candidate would have to compute."""
    return max(0, request.prompt_tokens - candidate.cached_tokens)


def has_room(
    request: RequestInfo, candidate: Candidate, kv_share: float | None
) -> bool:
    """Return whether the prompt's KV can arrive there beside all that is in flight.

    KV that arrives holds blocks before its request runs, and cannot be preempted: where
    everything waits for blocks, an engine can stop for good (vLLM 0.18.1;
    connectors/direct_read/scheduler.py). So at most `kv_share` of the instance's KV
    may be in flight; the rest is for answers still to come. Without a share there is
    always room.
    """
    if candidate.kv_tokens is None or kv_share is None:
        return True
    in_flight = candidate.ongoing_tokens + request.prompt_tokens
    return in_flight <= kv_share * candidate.kv_tokens


def lowest(candidates: list[Candidate], scores: list[float], arrivals: int) -> int:
    """Return the index of the lowest score.

    Ties go to fewer requests, then fewer ongoing tokens, then to the candidate whose
    turn it is: the first at or after `arrivals` modulo the number of candidates.
    """
    best = min(scores)
    tied = [index for index, score in enumerate(scores) if score == best]
    if len(tied) == 1:
        return tied[0]

    def rank(index: int) -> tuple[int, int, int]:
        candidate = candidates[index]
        turn = (index - arrivals) % len(candidates)
        return candidate.requests, candidate.ongoing_tokens, turn

    return min(tied, key=rank)


def placed(
    candidates: list[Candidate], scores: list[float], index: int, reason: str
) -> Decision:
    """Return the decision to prefill and decode on one of the candidates."""
    names = [candidate.name for candidate in candidates]
    by_name = dict(zip(names, scores, strict=True))
    return Decision(names[index], None, by_name, reason)


def least(
    candidates: list[Candidate], scores: list[float], snapshot: Snapshot, reason: str
) -> Decision:
    """Return the decision to prefill and decode where the score is lowest."""
    index = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, index, reason)


def drawn(
    candidates: list[Candidate], scores: list[float], snapshot: Snapshot, reason: str
) -> Decision:
    """Return the decision to place where the score is lowest, drawn among equal ones.

    The draw depends on the request's number alone, so that it can be repeated.
    """
    best = min(scores)
    tied = [index for index, score in enumerate(scores) if score == best]
    index = random.Random(snapshot.arrivals).choice(tied) if tied[1:] else tied[0]
    return placed(candidates, scores, index, reason)
