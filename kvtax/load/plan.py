# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: what to send, how fast, in which phases. Read from JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]

# vLLM's smallest block: prompts that differ here share no cached block.
FIRST_BLOCK_TOKENS = 16


class PlanError(ValueError):
    """The plan cannot be used; the message names the file and the field."""


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`requests` requests at `rate_rps` a second.

    It follows the phase before without pause or, with `after_answers`, once all earlier
    requests are answered: then it does not matter when it begins, and the lag of its
    requests does not count. `reset_prefix_cache` resets before it. Requests have the
    plan's shape where the phase does not say another.
    """

    name: Name
    requests: Count
    rate_rps: Positive
    after_answers: bool = False
    reset_prefix_cache: bool = False
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests to send, in phases."""

    model: Name
    vocab_size: Annotated[int, Meta(ge=2)]
    prompt_tokens: Count
    output_tokens: Count
    phases: Annotated[list[Phase], Meta(min_length=1)]
    seed: Annotated[int, Meta(ge=0)] = 0
    arrival: Literal["constant", "poisson"] = "constant"
    lag_budget_ms: Positive = 50.0
    request_timeout_s: Positive = 60.0

    def shape(self, phase: Phase) -> tuple[int, int]:
        """Return the tokens of a prompt and of an answer in a phase."""
        return (
            phase.prompt_tokens or self.prompt_tokens,
            phase.output_tokens or self.output_tokens,
        )

    @property
    def scheduled(self) -> int:
        """The number of requests over all phases."""
        return sum(phase.requests for phase in self.phases)


def read_plan(path: Path) -> Plan:
    """Read and check a plan file. Raises PlanError."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise PlanError(f"{path}: {error}") from error
    names = [phase.name for phase in plan.phases]
    if len(set(names)) < len(names):
        raise PlanError(f"{path}: phase names must differ, got {', '.join(names)}")
    shortest = min(plan.shape(phase)[0] for phase in plan.phases)
    first_blocks = (plan.vocab_size - 1) ** min(shortest, FIRST_BLOCK_TOKENS)
    if first_blocks < 100 * plan.scheduled:
        raise PlanError(
            f"{path}: too few distinct prompts of {shortest} tokens for "
            f"{plan.scheduled} requests: raise vocab_size or prompt_tokens"
        )
    return plan
