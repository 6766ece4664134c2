# SPDX-License-Identifier: Apache-2.0
"""breakdown.json: the proxy's `/breakdown` after the last request of a run."""

from __future__ import annotations

import msgspec


class CachedTokens(msgspec.Struct):
    """Tokens cached at an instance: by the proxy's mirror, and by its KV events.

    Without KV events there is the mirror alone, and all other fields are null.
    """

    mirror_tokens: int | None = None
    """What the proxy believes from its own decisions."""
    exact_tokens: int | None = None
    """What the KV events say; null where llm-d's code reads them: it does not count."""
    mirror_minus_exact_tokens: int | None = None
    """Above 0: the mirror holds more."""
    mean_difference_tokens: float | None = None
    """Mean of |mirror - exact| over the prompts that went to the instance; null
    without one."""
    compared_prompts: int | None = None
    """How many prompts that mean is over."""
    complete: bool | None = None
    """Whether all KV events since the instance's start have been applied."""
    gaps: int | None = None
    """Gaps in the events' sequence numbers."""
    skipped_blocks: int | None = None
    """Blocks that kvindexd does not keep, as no prompt could be found in them."""


class InstanceBreakdown(msgspec.Struct, kw_only=True):
    """One instance as the proxy sees it."""

    healthy: bool = True
    """Whether it gets requests."""
    requests: int = 0
    """Requests in flight."""
    ongoing_tokens: int = 0
    """Their prompt tokens, and the events passed on."""
    pending_prefill_tokens: int = 0
    """Uncached prompt tokens of those without a first token."""
    ended: dict[str, int] = {}
    """Requests that ended, by status."""
    cache: CachedTokens
    """What is cached there."""


class DecisionTimes(msgspec.Struct):
    """Of the last decisions: look-up, snapshot and policy together."""

    n: int
    """How many."""
    p50: float
    """In us."""
    p99: float
    """In us."""


class Breakdown(msgspec.Struct):
    """The whole document."""

    instances: dict[str, InstanceBreakdown]
    """By name."""
    offloads: int = 0
    """Prefills under way for a decode on another instance."""
    decision_us: DecisionTimes | None = None
    """How long decisions took; null without one."""
