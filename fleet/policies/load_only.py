# SPDX-License-Identifier: Apache-2.0
"""load_only: the least loaded instance, blind to what is cached where.

score = ongoing tokens (prompt and generated, of the requests in flight).
"""

from __future__ import annotations

import msgspec

from .decision import Ask, Decision, Snapshot, lowest, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    scores = [float(one.ongoing_tokens) for one in candidates]
    best = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, best, "least load")
