# SPDX-License-Identifier: Apache-2.0
"""lmetric: the work in front of the first token times the batch it joins.

score = (pending prefill tokens + the request's new tokens) * (requests + 1). No session
affinity, no override, no parameter; ties as in decision.lowest.

LMetric (arXiv:2603.15202) multiplies the prefill tokens an instance would have to
compute by its batch size. The batch is counted with this request in it: without, all
idle instances would score 0, whatever they have cached.
"""

from __future__ import annotations

import msgspec

from .decision import Ask, Decision, Snapshot, lowest, new_tokens, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    scores = [
        float((one.pending_prefill_tokens + new_tokens(ask, one)) * (one.requests + 1))
        for one in candidates
    ]
    best = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, best, "lowest score")
