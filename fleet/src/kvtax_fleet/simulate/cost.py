# SPDX-License-Identifier: Apache-2.0
"""The time of a step: the device by the fleet's profile, the host as measured."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from kvtax.engine.null_model import Forward
from kvtax.engine.vllm_plugin.kvtax_null_model.forward import SimulatedForward

from kvtax_fleet.records.host_times import RequestTime, StepTime, StepTimes


class Step(NamedTuple):
    """The properties of a step that decide its time.

    `context_tokens`: tokens of its requests before it. `attended_tokens`: the sum of
    the positions of its tokens: each attends to all before it.
    """

    requests: int
    new_requests: int
    tokens: int
    context_tokens: int
    attended_tokens: int
    cached_blocks: int


class StepCost:
    """The null model's forward by its own formula, and the host's part before it.

    The host's work after a forward counts as before the next one: it is on the same
    thread.
    """

    def __init__(self, forward: Forward, host: StepTimes) -> None:
        self._forward = SimulatedForward(**msgspec.structs.asdict(forward))
        self._host = host

    def host_ns(self, step: Step) -> int:
        host = self._host
        return round(1e3 * (_us(host.scheduler, step) + _us(host.worker, step)))

    def device_ns(self, step: Step) -> int:
        """Return the time of the forward; 0 if nothing was scheduled."""
        if not step.tokens:
            return 0
        us = self._forward.duration_us(
            step.tokens, step.attended_tokens, step.context_tokens
        )
        return round(1e3 * us)


def _us(time: StepTime, step: Step) -> float:
    return (
        time.base_us
        + time.us_per_request * step.requests
        + time.us_per_new_request * step.new_requests
        + time.us_per_1k_context_tokens * step.context_tokens / 1e3
        + time.us_per_1k_cached_blocks * step.cached_blocks / 1e3
    )


def request_ns(time: RequestTime, prompt_tokens: int) -> int:
    """Return the time of a request outside of the engine, one way."""
    us = time.base_us + time.us_per_1k_prompt_tokens * prompt_tokens / 1e3
    return round(1e3 * us)
