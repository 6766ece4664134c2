# SPDX-License-Identifier: Apache-2.0
"""migrate: placed like linear, but sessions move on, with their KV, as they grow.

A session is due to leave its instance before every `every_turns`-th turn there, or when
its prompt has grown by `grown_tokens` there; 0 is never. It then goes to the instance
with the fewest ongoing tokens, if these are fewer than where it is: it decodes and
stays there, while the prompt is prefilled where its cache is, and its KV moves once. It
stays if nobody has less to do and room for the KV, or if `max_offloads` prefills for
another instance are under way.

What a move costs is its prompt's KV and the time of the hand-over; what it brings is
the difference of the ongoing tokens, which the snapshot has.
"""

from __future__ import annotations

import msgspec

from . import linear
from .decision import Ask, Decision, Snapshot, has_room, lowest, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """linear's parameters; when to move; what limits a transfer, as in elastic."""

    alpha: float = 1.0
    overload: float = 2.0
    every_turns: int = 10
    grown_tokens: int = 20_000
    max_offloads: int = 2
    prefill_timeout_s: float | None = None
    kv_share: float = 0.9


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    limits = linear.Parameters(parameters.alpha, parameters.overload)
    chosen = linear.decide(ask, snapshot, limits)
    why = _due(ask, snapshot, parameters)
    if why is None or chosen.instance != snapshot.pinned:
        return chosen

    def stays(because: str) -> Decision:
        return msgspec.structs.replace(chosen, reason=f"pinned: {why}, but {because}")

    if snapshot.offloads >= parameters.max_offloads:
        return stays(f"{snapshot.offloads} offloads under way")
    open_to_it = [
        one
        for one in serving(snapshot)
        if one.name == chosen.instance or has_room(ask, one, parameters.kv_share)
    ]
    loads = [float(one.ongoing_tokens) for one in open_to_it]
    best = open_to_it[lowest(open_to_it, loads, snapshot.arrivals)]
    here = next(one for one in open_to_it if one.name == chosen.instance)
    if best.ongoing_tokens >= here.ongoing_tokens:
        return stays("nobody has less to do and room")
    if here.role == "decode":
        return stays("its instance does not prefill")
    moved = placed(open_to_it, loads, open_to_it.index(best), f"{why}: moved")
    return msgspec.structs.replace(
        moved,
        prefill=here.name,
        moves_from=here.name,
        prefill_timeout_s=parameters.prefill_timeout_s,
    )


def _due(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> str | None:
    """Why the session should leave its instance, if it should."""
    if 0 < parameters.every_turns <= snapshot.pinned_turns:
        return f"{snapshot.pinned_turns} turns there"
    if snapshot.pinned_at_tokens is not None:
        grown = ask.prompt_tokens - snapshot.pinned_at_tokens
        if 0 < parameters.grown_tokens <= grown:
            return f"{grown} tokens longer"
    return None
