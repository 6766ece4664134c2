# SPDX-License-Identifier: Apache-2.0
"""Request bodies: seeded random token ids, no two with a common first block."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from lab.load.arrivals import PROMPTS
from lab.load.plan import FIRST_BLOCK_TOKENS, Plan


def bodies(plan: Plan) -> Iterator[bytes]:
    """The JSON body of each request in turn."""
    rng = np.random.default_rng([PROMPTS, plan.seed])
    seen: set[bytes] = set()
    for _ in range(plan.scheduled):
        yield completion_body(plan.model, _fresh(plan, rng, seen), plan.output_tokens)


def _fresh(plan: Plan, rng: np.random.Generator, seen: set[bytes]) -> list[int]:
    while True:  # a Plan leaves room: hardly ever more than once
        prompt = rng.integers(1, plan.vocab_size, plan.prompt_tokens, dtype=np.int32)
        first_block = prompt[:FIRST_BLOCK_TOKENS].tobytes()
        if first_block not in seen:
            seen.add(first_block)
            return prompt.tolist()


def completion_body(
    model: str, prompt: list[int] | msgspec.Raw, output_tokens: int
) -> bytes:
    """A /v1/completions body that makes the server produce exactly `output_tokens`."""
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
