# SPDX-License-Identifier: Apache-2.0
"""decisions.jsonl and breakdown.json: what the proxy decided, and its state at the end.

Every request to a completion endpoint has exactly one `end` line. A request that got to
a decision has a `decision` line before it, more if the connection to an instance was
lost. A killed proxy leaves decisions without ends. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtax_fleet.records.instances import Instance, Role


class DecisionsHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.decisions/1"
):
    """Header."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of all `_ns`."""
    policy: str
    """Name of the policy."""
    parameters: dict[str, Any] = {}
    """Of the policy, as resolved."""
    settings: dict[str, Any] = {}
    """All other settings of the proxy, by option."""
    instances: list[Instance] = []
    """The instances, in their order."""


class Candidate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An instance as a policy sees it."""

    name: str
    """Name of the instance."""
    role: Role
    """What the instance is for."""
    requests: int
    """Requests in flight."""
    ongoing_tokens: int
    """Prompt tokens of the requests in flight, and the events passed on."""
    pending_prefill_tokens: int
    """Uncached prompt tokens of the requests in flight without a first token."""
    cached_tokens: int
    """How much of this prompt's beginning the instance has."""
    kv_tokens: int | None = None
    """How many tokens of KV it can hold; null where not reported."""
    waiting: int | None = None
    """Requests in its queue, by its metrics; null unless the policy reads them."""
    kv_used: float | None = None
    """Share of its KV blocks in use, by its metrics; null as above."""


class Snapshot(msgspec.Struct, frozen=True):
    """The healthy instances in a fixed order, and what a policy may remember."""

    candidates: list[Candidate]
    """The healthy instances."""
    pinned: str | None
    """The instance of the session's last request."""
    arrivals: int
    """Requests before this one."""
    offloads: int
    """Prefills under way for a decode on another instance."""
    offloaded: int = 0
    """Decisions before this one that named such a prefill."""


class DecisionRecord(msgspec.Struct, kw_only=True, tag_field="type", tag="decision"):
    """One decision, and all that it was made of."""

    id: str
    """`X-Request-Id`."""
    number: int
    """The proxy's own count. It joins lines even if clients repeat an id."""
    attempt: int
    """Counts from 0; another follows where a connection was lost: the last counts."""
    session: str | None
    """`X-Session-Id`; null without it."""
    at_ns: int
    """When it was decided."""
    policy: str
    """The policy that decided."""
    instance: str
    """Where the request goes."""
    prefill_instance: str | None
    """Where it is prefilled first; null: where it goes."""
    reason: str
    """Why, in words."""
    kind: str | None = msgspec.field(name="class")
    """`WARM`, `MEDIUM`, `HEAVY` or `HUGE`, where the policy distinguishes them."""
    prefill_timeout_s: float | None = None
    """How long the prefill elsewhere may take; null: `prefill_timeout_s` above."""
    prompt_tokens: int
    """Exact for the form `ids`, else an estimate."""
    form: str
    """Form of the prompt: `ids`, `text`, `chat` or `other`."""
    cache: Literal["mirror", "exact"]
    """Whose `cached_tokens` the snapshot has."""
    scores: dict[str, float]
    """Score of every candidate that could have been `instance`; lower is better."""
    snapshot: Snapshot
    """Exactly what the policy was given."""
    decision_us: float
    """Time for look-up, snapshot and policy."""


OffloadFailure = Literal[
    "not_possible",
    "resting",
    "no_engine_id",
    "prefill_slow",
    "prefill_lost",
    "prefill_refused",
    "no_kv_params",
    "handover_slow",
    "decode_lost",
    "decode_refused",
    "no_token",
    "cancelled",
]


class Offload(msgspec.Struct, omit_defaults=True):
    """A prefill on one instance (P) for the decode on another (D)."""

    prefill_instance: str
    """P."""
    begun_ns: int
    """When the proxy began with it."""
    prefill_asked_ns: int | None = None
    """When the request to P was sent."""
    prefilled_ns: int | None = None
    """When P had answered: its queue and its prefill lie before that."""
    decode_asked_ns: int | None = None
    """When the request to D was sent: over Mooncake with P, over NIXL after it."""
    ended_ns: int | None = None
    """When D's first token was here, or the offload was given up."""
    failure: OffloadFailure | None = None
    """Why its KV was not used. `not_possible`: the request cannot be split; `resting`:
    KV from P did not reach D lately; `no_engine_id`: P's bootstrap server did not tell;
    `prefill_slow`, `handover_slow`: past the time limit; `prefill_lost`, `decode_lost`:
    no connection, or it broke; `prefill_refused`, `decode_refused`: a bad HTTP status;
    `no_kv_params`: P's answer does not say where the KV is; `no_token`: D ended without
    one, as it does if it could not load the KV; `cancelled`: the client has gone."""

    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, as far as it came; D may be faster than P's own answer."""
        moments = {
            "before_prefill": (self.begun_ns, self.prefill_asked_ns),
            "prefill": (self.prefill_asked_ns, self.prefilled_ns),
            "handover": (self.prefilled_ns, self.ended_ns),
            "total": (self.begun_ns, self.ended_ns),
        }
        return {
            phase: max(0.0, (end_ns - start_ns) / 1e9)
            for phase, (start_ns, end_ns) in moments.items()
            if start_ns is not None and end_ns is not None
        }


class DecisionEnd(msgspec.Struct, tag_field="type", tag="end"):
    """End of a request at the proxy."""

    id: str
    """As in the decision."""
    number: int
    """As in the decision."""
    session: str | None
    """As in the decision."""
    status: (
        Literal["ok", "failed", "refused", "client_gone", "proxy_stopped"] | None
    ) = None
    """How it ended; no line is written before it has. `refused`: a bad request, no
    instance, or the proxy itself failed (500)."""
    error: str | None = None
    """Why it is not ok."""
    http_status: int | None = None
    """Of the answer."""
    instance: str | None = None
    """Where the request went."""
    prefill_instance: str | None = None
    """Whose KV was really used."""
    fallback: str | None = None
    """Why that is not the decision's."""
    offload: Offload | None = None
    """The prefill elsewhere, if the decision named one; the last attempt's."""
    generated_tokens: int = 0
    """Events (`data:`, but for `[DONE]`) that were passed on: fewer than the tokens
    where a server puts several into one (`--stream-interval`)."""
    first_byte_ns: int | None = None
    """First byte passed on; null if there was none."""
    end_ns: int | None = None
    """When the request ended."""


class CachedTokens(msgspec.Struct):
    """Tokens cached at an instance: by the proxy's mirror, and by its KV events.

    Without KV events there is the mirror alone, and all other fields are null.
    """

    mirror_tokens: int | None = None
    """What the proxy believes from its own decisions."""
    exact_tokens: int | None = None
    """By the KV events."""
    mirror_minus_exact_tokens: int | None = None
    """Above 0: the mirror holds more."""
    mean_difference_tokens: float | None = None
    """Mean of |mirror - exact| over the prompts that went to the instance; null
    without one."""
    compared_prompts: int | None = None
    """How many prompts that mean is over."""


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
    """Times of the last decisions: look-up, snapshot and policy together."""

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
