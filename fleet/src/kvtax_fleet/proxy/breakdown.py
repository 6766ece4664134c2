# SPDX-License-Identifier: Apache-2.0
"""The proxy's state as /breakdown and breakdown.json report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvtax_fleet.proxy.core import Core
from kvtax_fleet.records.decisions import (
    Breakdown,
    CachedTokens,
    DecisionTimes,
    InstanceBreakdown,
)


def breakdown_of(core: Core[Any], exact_tokens: Mapping[str, int]) -> Breakdown:
    """Describe the present state; `exact_tokens` are cached, by instance if known."""
    return Breakdown(
        instances={
            name: _instance(core, place, name, exact_tokens.get(name))
            for place, name in enumerate(core.instances)
        },
        offloads=core.loads.offloads,
        decision_us=_decision_times(core),
    )


def _instance(
    core: Core[Any], place: int, name: str, exact_tokens: int | None
) -> InstanceBreakdown:
    load = core.loads[name]
    return InstanceBreakdown(
        healthy=name not in core.health.out,
        requests=load.requests,
        ongoing_tokens=load.ongoing_tokens,
        pending_prefill_tokens=load.pending_prefill_tokens,
        ended={status: n for (other, status), n in core.ended.items() if other == name},
        cache=_cached(core, place, exact_tokens),
    )


def _cached(core: Core[Any], place: int, exact_tokens: int | None) -> CachedTokens:
    mirror_tokens = round(core.mirror.tokens[place])
    if exact_tokens is None:
        return CachedTokens(mirror_tokens)
    compared = core.router.differences[place]
    total = core.router.difference_tokens[place]
    return CachedTokens(
        mirror_tokens=mirror_tokens,
        exact_tokens=exact_tokens,
        mirror_minus_exact_tokens=mirror_tokens - exact_tokens,
        mean_difference_tokens=total / compared if compared else None,
        compared_prompts=compared,
    )


def _decision_times(core: Core[Any]) -> DecisionTimes | None:
    times_us = core.router.decision_us
    if not times_us:
        return None
    p50, p99 = np.percentile(times_us, [50, 99]).round(1).tolist()
    return DecisionTimes(len(times_us), p50, p99)
