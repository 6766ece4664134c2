# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: what to send, when, in which phases; and the prompts.

The schedule is a pure function of the plan, so a seed is a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]

# vLLM's smallest block: prompts that differ here share no cached block.
FIRST_BLOCK_TOKENS = 16


class PlanError(ValueError):
    """The plan cannot be used; the message names the file and the field."""


class PlannedPhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`requests` requests at `rate_rps` a second.

    It follows the phase before without pause or, with `after_answers`, once all earlier
    requests are answered: then it does not matter when it begins, and the lag of its
    requests does not count. `reset_prefix_cache` resets before it, and then nothing
    happens for `pause_s`. Requests have the plan's shape where the phase does not say
    another. With `repeats_prompt` they send the last prompt of that phase again.
    """

    name: Name
    requests: Count
    rate_rps: Positive
    after_answers: bool = False
    reset_prefix_cache: bool = False
    pause_s: Annotated[float, Meta(ge=0)] = 0.0
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    repeats_prompt: Name | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests to send, in phases."""

    model: Name
    vocab_size: Annotated[int, Meta(ge=2)]
    prompt_tokens: Count
    output_tokens: Count
    phases: Annotated[list[PlannedPhase], Meta(min_length=1)]
    seed: Annotated[int, Meta(ge=0)] = 0
    arrival: Literal["constant", "poisson"] = "constant"
    lag_budget_ms: Positive = 50.0
    request_timeout_s: Positive = 60.0

    def shape(self, phase: PlannedPhase) -> tuple[int, int]:
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
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanError(f"{path}: {error}") from error
    names = [phase.name for phase in plan.phases]
    if len(set(names)) < len(names):
        raise PlanError(f"{path}: phase names must differ, got {', '.join(names)}")
    for number, phase in enumerate(plan.phases):
        if phase.repeats_prompt and phase.repeats_prompt not in names[:number]:
            raise PlanError(
                f"{path}: phase {phase.name} repeats a prompt of "
                f"{phase.repeats_prompt}, which is no phase before it"
            )
    shortest = min(plan.shape(phase)[0] for phase in plan.phases)
    first_blocks = (plan.vocab_size - 1) ** min(shortest, FIRST_BLOCK_TOKENS)
    if first_blocks < 100 * plan.scheduled:
        raise PlanError(
            f"{path}: too few distinct prompts of {shortest} tokens for "
            f"{plan.scheduled} requests: raise vocab_size or prompt_tokens"
        )
    return plan


# First word of the seed: keeps arrivals and prompts independent of each other.
ARRIVALS, PROMPTS, PROBE = 0, 1, 2


class Timetable(NamedTuple):
    """Due times of one phase, in ns after its start, and when the next phase starts."""

    phase: PlannedPhase
    due_ns: list[int]
    length_ns: int


def timetables(plan: Plan) -> list[Timetable]:
    """One timetable a phase: gaps of 1/rate, exponential with that mean if Poisson."""
    rng = np.random.default_rng([ARRIVALS, plan.seed])
    return [_timetable(phase, plan.arrival, rng) for phase in plan.phases]


def _timetable(
    phase: PlannedPhase, arrival: str, rng: np.random.Generator
) -> Timetable:
    mean_ns = 1e9 / phase.rate_rps
    if arrival == "poisson":
        gaps_ns = rng.exponential(mean_ns, phase.requests)
    else:
        gaps_ns = np.full(phase.requests, mean_ns)
    ends_ns = np.cumsum(gaps_ns)
    due_ns = np.concatenate(([0.0], ends_ns[:-1])).astype(np.int64).tolist()
    return Timetable(phase, due_ns, int(ends_ns[-1]))


def bodies(plan: Plan) -> Iterator[bytes]:
    """Yield the JSON body of each request in turn."""
    rng = np.random.default_rng([PROMPTS, plan.seed])
    seen: set[bytes] = set()
    repeated = {phase.repeats_prompt for phase in plan.phases}
    last_prompts: dict[str, list[int]] = {}
    for phase in plan.phases:
        prompt_tokens, output_tokens = plan.shape(phase)
        for _ in range(phase.requests):
            if phase.repeats_prompt:
                prompt = last_prompts[phase.repeats_prompt]
            else:
                prompt = _fresh(plan, prompt_tokens, rng, seen)
            yield completion_body(plan.model, prompt, output_tokens)
        if phase.name in repeated:
            last_prompts[phase.name] = prompt


def _fresh(
    plan: Plan, tokens: int, rng: np.random.Generator, seen: set[bytes]
) -> list[int]:
    while True:  # a Plan leaves room: hardly ever more than once
        prompt = rng.integers(1, plan.vocab_size, tokens, dtype=np.int32)
        first_block = prompt[:FIRST_BLOCK_TOKENS].tobytes()
        if first_block not in seen:
            seen.add(first_block)
            token_ids: list[int] = prompt.tolist()
            return token_ids


def completion_body(
    model: str, prompt: list[int] | msgspec.Raw, output_tokens: int
) -> bytes:
    """Build a /v1/completions body for exactly `output_tokens`."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "min_tokens": output_tokens,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    )
