# SPDX-License-Identifier: Apache-2.0
"""round_robin: each in turn, whatever they hold and however loaded they are.

score = how many turns the instance still has to wait; arrivals modulo their number.
"""

from __future__ import annotations

import msgspec

from .decision import Ask, Decision, Snapshot, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    count = len(candidates)
    turn = snapshot.arrivals % count
    scores = [float((index - turn) % count) for index in range(count)]
    return placed(candidates, scores, turn, "next in turn")
