# SPDX-License-Identifier: Apache-2.0
"""What a policy is given and what it decides: plain values, no clock, no I/O.

A policy is a function (ask, snapshot, parameters) -> Decision. Equal arguments give
equal decisions, so a recorded snapshot can be decided again by any policy. What is
recorded of it, Snapshot and Candidate, is in lab/records/decisions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lab.records.decisions import Candidate, Snapshot


class Ask(msgspec.Struct, frozen=True):
    """What is known of a request before it is sent on."""

    session: str | None
    prompt_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes.

    `prefill`: prefill there first; the KV then moves to `instance`. `read_from`: the
    peer that `instance` may read the prefix from. `scores`: of every candidate that
    could have been `instance`; lower is better. `kind`: WARM to HUGE, where the policy
    tells them apart. `moves_from`: the instance that the session leaves for good, whose
    KV moves. `prefill_timeout_s`: for the prefill elsewhere; None is the proxy's.
    """

    instance: str
    prefill: str | None
    read_from: str | None
    scores: dict[str, float]
    reason: str
    kind: str | None = None
    moves_from: str | None = None
    prefill_timeout_s: float | None = None


Policy = Callable[[Ask, Snapshot, Any], Decision]


class NoInstance(Exception):
    """No healthy instance has the role that the policy needs."""


def serving(snapshot: Snapshot) -> list[Candidate]:
    """The candidates that may answer requests: all but pure prefill instances."""
    found = [one for one in snapshot.candidates if one.role != "prefill"]
    if not found:
        raise NoInstance("no healthy instance that decodes")
    return found


def new_tokens(ask: Ask, candidate: Candidate) -> int:
    """Prompt tokens that the candidate would have to compute."""
    return max(0, ask.prompt_tokens - candidate.cached_tokens)


def has_room(ask: Ask, candidate: Candidate, kv_share: float) -> bool:
    """Whether the prompt's KV can arrive there beside all that is in flight.

    KV that arrives holds blocks before its request runs, and cannot be preempted: where
    everything waits for blocks, an engine can stop for good (vLLM 0.18.1;
    connectors/direct_read/admission.py). So no more may be in flight than
    `kv_share` of what the instance holds; the rest is for answers still to come.
    """
    if candidate.kv_tokens is None:
        return True
    in_flight = candidate.ongoing_tokens + ask.prompt_tokens
    return in_flight <= kv_share * candidate.kv_tokens


def lowest(candidates: list[Candidate], scores: list[float], arrivals: int) -> int:
    """Index of the lowest score.

    Ties go to fewer requests, then fewer ongoing tokens, then to the one whose turn it
    is: the first at or after `arrivals` modulo the number of candidates.
    """
    best = min(scores)
    tied = [index for index, score in enumerate(scores) if score == best]
    if len(tied) == 1:
        return tied[0]

    def rank(index: int) -> tuple[int, int, int]:
        one = candidates[index]
        turn = (index - arrivals) % len(candidates)
        return one.requests, one.ongoing_tokens, turn

    return min(tied, key=rank)


def placed(
    candidates: list[Candidate], scores: list[float], index: int, reason: str
) -> Decision:
    """The decision to prefill and decode on one of the candidates."""
    names = [one.name for one in candidates]
    by_name = dict(zip(names, scores, strict=True))
    return Decision(names[index], None, None, by_name, reason)
