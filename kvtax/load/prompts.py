# SPDX-License-Identifier: Apache-2.0
"""Request bodies: seeded random token ids, no two with a common first block."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from kvtax.load.plan import FIRST_BLOCK_TOKENS, PROMPTS, Plan


def bodies(plan: Plan) -> Iterator[bytes]:
    """Yield the JSON body of each request in turn."""
    rng = np.random.default_rng([PROMPTS, plan.seed])
    seen: set[bytes] = set()
    for phase in plan.phases:
        prompt_tokens, output_tokens = plan.shape(phase)
        for _ in range(phase.requests):
            prompt = _fresh(plan, prompt_tokens, rng, seen)
            yield completion_body(plan.model, prompt, output_tokens)


def _fresh(
    plan: Plan, tokens: int, rng: np.random.Generator, seen: set[bytes]
) -> list[int]:
    while True:  # a Plan leaves room: hardly ever more than once
        prompt = rng.integers(1, plan.vocab_size, tokens, dtype=np.int32)
        first_block = prompt[:FIRST_BLOCK_TOKENS].tobytes()
        if first_block not in seen:
            seen.add(first_block)
            return prompt.tolist()


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
