# SPDX-License-Identifier: Apache-2.0
"""Prompts for a storm, and the oracle: the tokens that a plain server answers with.

A prompt is taken only if each token of its answer is well ahead of the next best one.
Then the rounding of float32, which differs with the size of the batch, changes no
answer. How much the oracle notices is measured too: how often one wrong block of a
prompt changes its answer.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import aiohttp

from benchmarks.results import NotMeasured
from kvtax.engine.server import SERVED_MODEL, Server
from tests.harness.tiny.server import BLOCK_TOKENS, VOCAB_SIZE, Tokens

ANSWER_TOKENS = 6
# Prompts begin with one of this many beginnings, of this many blocks (least, most).
NUM_BEGINNINGS = 60
BEGINNING_BLOCKS = (2, 12)
# And go on with tokens of their own (least, most).
OWN_TOKENS = (20, 400)
# Between the log probabilities of the best two tokens. Rounding moves them by 1e-5.
MIN_LEAD = 0.02
AT_ONCE = 16
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Prompt:
    tokens: Tokens
    expected: Tokens


@dataclass(frozen=True)
class Pool:
    """`seen` prompts got another answer when one of their blocks was replaced."""

    prompts: list[Prompt]
    seen: int


async def ask(
    session: aiohttp.ClientSession,
    server: Server,
    tokens: Tokens,
    max_tokens: int = ANSWER_TOKENS,
    **body: object,
) -> dict:
    """Return the one choice of a greedy completion. Raises NotMeasured if it failed."""
    body |= {
        "model": SERVED_MODEL,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise NotMeasured(f"{response.status}: {await response.text()}")
        (choice,) = (await response.json())["choices"]
    if len(choice["token_ids"]) != max_tokens:
        raise NotMeasured(f"{choice['token_ids']} are not {max_tokens} tokens")
    return choice


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


async def new_pool(plain: Server, size: int, seed: int) -> Pool:
    """`size` prompts, with the answers that `plain` gives."""
    chance = random.Random(seed)
    beginnings = [
        random_tokens(chance, BLOCK_TOKENS * chance.randint(*BEGINNING_BLOCKS))
        for _ in range(NUM_BEGINNINGS)
    ]
    prompts: list[Prompt] = []
    seen = 0
    async with new_session() as session:
        while len(prompts) < size:
            drawn = [
                chance.choice(beginnings)
                + random_tokens(chance, chance.randint(*OWN_TOKENS))
                for _ in range(AT_ONCE)
            ]
            clear = await asyncio.gather(
                *(_clear_answer(session, plain, tokens) for tokens in drawn)
            )
            taken = [
                Prompt(tokens, expected)
                for tokens, expected in zip(drawn, clear, strict=True)
                if expected
            ][: size - len(prompts)]
            others = await asyncio.gather(
                *(
                    ask(session, plain, with_another_block(chance, prompt.tokens))
                    for prompt in taken
                )
            )
            seen += sum(
                other["token_ids"] != prompt.expected
                for prompt, other in zip(taken, others, strict=True)
            )
            prompts += taken
    return Pool(prompts, seen)


def random_tokens(chance: random.Random, count: int) -> Tokens:
    return chance.choices(range(VOCAB_SIZE), k=count)


def with_another_block(chance: random.Random, tokens: Tokens) -> Tokens:
    """`tokens` with one of the full blocks that can be pulled replaced."""
    start = BLOCK_TOKENS * chance.randrange((len(tokens) - 1) // BLOCK_TOKENS)
    block = random_tokens(chance, BLOCK_TOKENS)
    return tokens[:start] + block + tokens[start + BLOCK_TOKENS :]


async def _clear_answer(
    session: aiohttp.ClientSession, plain: Server, tokens: Tokens
) -> Tokens | None:
    """The answer, or None if one of its tokens was hardly ahead of another."""
    choice = await ask(
        session, plain, tokens, logprobs=2, return_tokens_as_token_ids=True
    )
    for best_two in choice["logprobs"]["top_logprobs"]:
        best, next_best = sorted(best_two.values(), reverse=True)[:2]
        if best - next_best < MIN_LEAD:
            return None
    return choice["token_ids"]
