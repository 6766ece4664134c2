# SPDX-License-Identifier: Apache-2.0
"""pd_sep: fixed pools; every prompt is prefilled in one and decoded in the other.

Decode: the instance of role `decode` with the fewest ongoing tokens. Prefill: the one
of role `prefill` with the fewest tokens to compute before ours are done, its pending
prefill tokens + the request's new tokens there. Without a healthy prefill instance the
decode instance does both. DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677)
are where the pools come from.
"""

from __future__ import annotations

import msgspec

from .decision import (
    Ask,
    Candidate,
    Decision,
    NoInstance,
    Snapshot,
    lowest,
    new_tokens,
    placed,
)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def least_prefill(ask: Ask, pool: list[Candidate], arrivals: int) -> Candidate:
    """Where the prompt's prefill would be done first."""
    work = [one.pending_prefill_tokens + new_tokens(ask, one) for one in pool]
    return pool[lowest(pool, work, arrivals)]


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance if there is no decode instance."""
    decode = [one for one in snapshot.candidates if one.role == "decode"]
    prefill = [one for one in snapshot.candidates if one.role == "prefill"]
    if not decode:
        raise NoInstance("no healthy instance of role decode")
    scores = [float(one.ongoing_tokens) for one in decode]
    best = lowest(decode, scores, snapshot.arrivals)
    if not prefill:
        return placed(decode, scores, best, "no healthy prefill instance: co-located")
    chosen = placed(decode, scores, best, "least load of each pool")
    source = least_prefill(ask, prefill, snapshot.arrivals)
    return msgspec.structs.replace(chosen, prefill=source.name)
