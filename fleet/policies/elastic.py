# SPDX-License-Identifier: Apache-2.0
"""elastic: placed like linear, but a heavy prefill is done on another instance.

With new = prompt tokens - cached tokens at the instance that linear chooses: WARM below
`warm_tokens`, MEDIUM up to `heavy_tokens`, HEAVY above (HUGE above 50,000). WARM and
MEDIUM prefill where they decode. A HEAVY or HUGE one prefills on another instance, and
its KV moves: by `prefill_on` the one with the fewest pending prefill tokens + new
tokens there, or the next in turn. It stays where it decodes if `max_offloads` are under
way, if there is no room for its KV to arrive, or if that other instance is overloaded:
more prefill tokens pending there than here, new ones included.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from . import linear
from .decision import Ask, Decision, Snapshot, has_room, new_tokens
from .pd_sep import least_prefill
from .size_class import HEAVY_ABOVE_TOKENS, HUGE_ABOVE_TOKENS, WARM_BELOW_TOKENS


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """linear's parameters; limits in new tokens; the most offloads under way; how much
    of an instance's KV may be in flight for more to arrive.
    """

    alpha: float = 1.0
    overload: float = 2.0
    warm_tokens: int = WARM_BELOW_TOKENS
    heavy_tokens: int = HEAVY_ABOVE_TOKENS
    max_offloads: int = 2
    prefill_on: Literal["least_prefill", "in_turn"] = "least_prefill"
    prefill_timeout_s: float | None = None
    kv_share: float = 0.9


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    limits = linear.Parameters(parameters.alpha, parameters.overload)
    chosen = linear.decide(ask, snapshot, limits)
    here = next(one for one in snapshot.candidates if one.name == chosen.instance)
    new = new_tokens(ask, here)
    if new < parameters.warm_tokens:
        return msgspec.structs.replace(chosen, kind="WARM")
    if new <= parameters.heavy_tokens:
        return msgspec.structs.replace(chosen, kind="MEDIUM")

    kind = "HUGE" if new > max(parameters.heavy_tokens, HUGE_ABOVE_TOKENS) else "HEAVY"

    def co_located(why: str) -> Decision:
        return msgspec.structs.replace(
            chosen, kind=kind, reason=f"{why}: not offloaded"
        )

    others = [
        one
        for one in snapshot.candidates
        if one.name != here.name and one.role != "decode"
    ]
    if not others:
        return co_located("no other prefill instance")
    if snapshot.offloads >= parameters.max_offloads:
        return co_located(f"{snapshot.offloads} offloads under way")
    if not has_room(ask, here, parameters.kv_share):
        return co_located(f"{here.name} has no room for KV to arrive")
    if parameters.prefill_on == "in_turn":
        source = others[snapshot.offloaded % len(others)]
    else:
        source = least_prefill(ask, others, snapshot.arrivals)
    if source.pending_prefill_tokens > here.pending_prefill_tokens + new:
        return co_located(f"{source.name} is overloaded")
    return msgspec.structs.replace(
        chosen,
        kind=kind,
        prefill=source.name,
        reason="heavy: offloaded",
        prefill_timeout_s=parameters.prefill_timeout_s,
    )
