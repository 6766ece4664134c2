# SPDX-License-Identifier: Apache-2.0
"""direct_read: placed like linear; a peer that has more of the prefix is named.

read_from = the other healthy instance with the longest cached prefix, if it is at least
`min_gain_tokens` longer than the chosen instance's. The chosen instance then reads
those blocks out of the peer's memory (connectors/direct_read) instead of computing
them. Ties go to the first in order: reading costs the peer next to nothing.
"""

from __future__ import annotations

import msgspec

from . import linear
from .decision import Ask, Decision, Snapshot


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """linear's parameters, and from what gain on a read is worth its lookup."""

    alpha: float = 1.0
    overload: float = 2.0
    min_gain_tokens: int = 512


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    limits = linear.Parameters(parameters.alpha, parameters.overload)
    chosen = linear.decide(ask, snapshot, limits)
    cached = {one.name: one.cached_tokens for one in snapshot.candidates}
    peer = max(cached, key=cached.__getitem__)
    if cached[peer] - cached[chosen.instance] < parameters.min_gain_tokens:
        return chosen
    return msgspec.structs.replace(chosen, read_from=peer)
