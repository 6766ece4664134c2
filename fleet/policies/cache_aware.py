# SPDX-License-Identifier: Apache-2.0
"""cache_aware: the longest cached prefix, unless load is uneven or little is cached.

With requests in flight as load: where the highest is more than `balance_requests` above
the lowest and more than `balance_factor` times it, the least loaded instance. Otherwise
the one with the longest cached prefix, if that is above `match_share` of the prompt;
the least loaded of several. Otherwise the least loaded.

So decides vllm-router's policy of this name, with these defaults. It matches a prompt
with a tree of what it sent where, evicted or not; here the proxy's mirror or the KV
events say what is cached.
"""

from __future__ import annotations

import msgspec

from .decision import Ask, Decision, Snapshot, lowest, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of the prompt; requests; and a factor, as above."""

    match_share: float = 0.3
    balance_requests: int = 64
    balance_factor: float = 1.5


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    loads = [one.requests for one in candidates]
    least, most = min(loads), max(loads)
    cached = max(one.cached_tokens for one in candidates)
    scores = [float(load) for load in loads]
    if (
        most - least > parameters.balance_requests
        and most > parameters.balance_factor * least
    ):
        reason = "uneven load: the least"
    elif cached > parameters.match_share * ask.prompt_tokens:
        reason = "longest cached prefix"
        scores = [-float(one.cached_tokens) for one in candidates]
    else:
        reason = "little is cached: the least load"
    best = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, best, reason)
