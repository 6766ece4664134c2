# SPDX-License-Identifier: Apache-2.0
"""weighted: a sum of three scores between 0 and 1, each with its weight.

- prefix: the share of the prompt that is cached there;
- queue: 1 for the instance with the fewest requests in flight, 0 for the one with most;
- kv: the share of its KV that no request in flight takes; 1 where nobody told its size.

So llm-d's router scores by default, with these weights. Its queue counts the requests
that wait in vLLM, which it reads from the instances' metrics; this proxy reads none.
"""

from __future__ import annotations

import msgspec

from .decision import Ask, Candidate, Decision, Snapshot, lowest, placed, serving


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights."""

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0


def free_kv(one: Candidate) -> float:
    """The share of its KV that no request in flight takes."""
    if not one.kv_tokens:
        return 1.0
    return max(0.0, 1 - one.ongoing_tokens / one.kv_tokens)


def decide(ask: Ask, snapshot: Snapshot, parameters: Parameters) -> Decision:
    """Raises NoInstance."""
    candidates = serving(snapshot)
    most = max(one.requests for one in candidates)
    spread = max(1, most - min(one.requests for one in candidates))
    # Lower is better in a decision.
    scores = [
        -(
            parameters.prefix * min(1.0, one.cached_tokens / max(1, ask.prompt_tokens))
            + parameters.queue * (most - one.requests) / spread
            + parameters.kv * free_kv(one)
        )
        for one in candidates
    ]
    best = lowest(candidates, scores, snapshot.arrivals)
    return placed(candidates, scores, best, "highest weighted score")
