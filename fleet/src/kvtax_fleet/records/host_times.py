# SPDX-License-Identifier: Apache-2.0
"""Times of a host per step and per request, as measured.

`python -m studies.host_table.host` makes fleet/configs/hosts/*.json.
"""

from __future__ import annotations

import msgspec


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time per step: the sum of these, each times what the step has of it."""

    base_us: float = 0.0
    """Of every step."""
    us_per_request: float = 0.0
    """For each request scheduled in the step."""
    us_per_new_request: float = 0.0
    """For each request that is scheduled for the first time, besides."""
    us_per_1k_context_tokens: float = 0.0
    """For each 1,000 tokens that the scheduled requests had before, all together."""
    us_per_1k_cached_blocks: float = 0.0
    """For each 1,000 cached block hashes."""


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host's parts of a step, the connector's among them."""

    scheduler: StepTime = StepTime()
    """`schedule()`, with the connector's scheduler side."""
    worker: StepTime = StepTime()
    """All else but the forward: the worker, with the connector's worker side, and
    `update_from_output()`."""


class RequestTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time per request: the sum of these."""

    base_us: float = 0.0
    """Of every request."""
    us_per_1k_prompt_tokens: float = 0.0
    """For each 1,000 tokens of its prompt."""


class RequestTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a request outside of the engine."""

    to_engine: RequestTime = RequestTime()
    """From the client's sending to the engine's queue, the proxy on the way. A server
    does this for one request after the other."""
    from_engine: RequestTime = RequestTime()
    """From the end of a step to the client, for each chunk of an answer."""


class HostTimes(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="schema",
    tag="kvtax.host_times/1",
):
    """Times of one kind of host."""

    summary: str
    """Which host, and what was measured on it."""
    steps: dict[str, StepTimes]
    """By connector config."""
    requests: RequestTimes = RequestTimes()
    """Alike with all connectors."""
