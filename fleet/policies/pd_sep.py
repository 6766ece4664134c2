# SPDX-License-Identifier: Apache-2.0
"""pd_sep: fixed pools; every prompt is prefilled in one and decoded in the other.

Decode: the instance of role `decode` with the fewest ongoing tokens. Prefill: the one
of role `prefill` with the fewest tokens to compute before ours are done, its pending
prefill tokens + the request's new tokens there. Without a healthy prefill instance, or
where no decode instance has room for the KV to arrive, the decode instance does both.
DistServe (arXiv:2401.09670) and Splitwise (arXiv:2311.18677)
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
    has_room,
    lowest,
    new_tokens,
    placed,
)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What limits a transfer, as in elastic."""

    prefill_timeout_s: float | None = None
    kv_share: float = 0.9


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
    with_room = [one for one in decode if has_room(ask, one, parameters.kv_share)]
    pool = with_room or decode
    scores = [float(one.ongoing_tokens) for one in pool]
    best = lowest(pool, scores, snapshot.arrivals)
    if not prefill:
        return placed(pool, scores, best, "no healthy prefill instance: co-located")
    if not with_room:
        return placed(pool, scores, best, "no room for KV to arrive: co-located")
    chosen = placed(pool, scores, best, "least load of each pool")
    source = least_prefill(ask, prefill, snapshot.arrivals)
    return msgspec.structs.replace(
        chosen, prefill=source.name, prefill_timeout_s=parameters.prefill_timeout_s
    )
