# SPDX-License-Identifier: Apache-2.0
"""linear: a session stays on its instance; a new one goes where load is low and its
prefix is cached.

score = ongoing tokens - alpha * cached tokens. A session's instance is kept unless its
ongoing tokens are above `overload` times the mean; then the lowest score decides. As an
instance's load is at most n times the mean of n, an `overload` of n or more never
moves a session: with two instances the default of 2 does not.

Linear combinations of load and cache hit are what LMetric (arXiv:2603.15202, section 2)
compares with; the session pin and its override are those of the reference study.
"""

from __future__ import annotations

import msgspec

from .decision import Ask, Candidate, Decision, Snapshot, lowest, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`alpha`: ongoing tokens that one cached token is worth."""

    alpha: float = 1.0
    overload: float = 2.0


def overloaded(one: Candidate, among: list[Candidate], factor: float) -> bool:
    """Whether its ongoing tokens are above `factor` times the mean."""
    total = sum(other.ongoing_tokens for other in among)
    return one.ongoing_tokens * len(among) > factor * total


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    alpha = parameters.alpha
    scores = [one.ongoing_tokens - alpha * one.cached_tokens for one in candidates]
    reason = "lowest score"
    if snapshot.pinned is not None:
        reason = "lowest score: the pinned instance is not there"
        for index, one in enumerate(candidates):
            if one.name != snapshot.pinned:
                continue
            if not overloaded(one, candidates, parameters.overload):
                return placed(candidates, scores, index, "pinned")
            reason = f"override: pinned is above {parameters.overload:g}x mean load"
    best = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, best, reason)
