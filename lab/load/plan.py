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
    """`requests` requests at `rate_rps` a second, after a reset if asked for."""

    name: Name
    requests: Count
    rate_rps: Positive
    reset_prefix_cache: bool = False


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every request has the same shape; the phases follow each other without pause."""

    model: Name
    vocab_size: Annotated[int, Meta(ge=2)]
    prompt_tokens: Count
    output_tokens: Count
    phases: Annotated[list[Phase], Meta(min_length=1)]
    seed: Annotated[int, Meta(ge=0)] = 0
    arrival: Literal["constant", "poisson"] = "constant"
    lag_budget_ms: Positive = 50.0
    request_timeout_s: Positive = 60.0

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
    first_blocks = (plan.vocab_size - 1) ** min(plan.prompt_tokens, FIRST_BLOCK_TOKENS)
    if first_blocks < 100 * plan.scheduled:
        raise PlanError(
            f"{path}: too few distinct prompts of {plan.prompt_tokens} tokens for "
            f"{plan.scheduled} requests: raise vocab_size or prompt_tokens"
        )
    return plan
