# SPDX-License-Identifier: Apache-2.0
"""A storm on two real engines: B reads from A while A prefills, evicts and is reset.

B takes A's blocks only while both were reset as often. So B is reset after A, when it
has answered all its requests; until then it computes. Every token that B answers with
is compared with a plain instance's. The same load without in-flight exclusion, and
without validation, must give wrong tokens, or the storm would prove nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvtax.engine.preflight import require_honest_transfers
from kvtax.engine.server import SERVED_MODEL, Server
from tests.e2e.gated_servers import (
    GatedServer,
    direct_read_overlay,
)
from tests.e2e.gates import OFFER_IN_FLIGHT, TRUST_ALL
from tests.harness.tiny import BLOCK_TOKENS, VOCAB_SIZE, TinyServers, Tokens, ready

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SEED = 1
REQUESTS, MOST_S = 1_500, 240.0
ANSWER_TOKENS = 6
# Prompts begin with one of this many beginnings, of this many blocks (least, most).
NUM_BEGINNINGS = 60
BEGINNING_BLOCKS = (2, 12)
# And go on with tokens of their own (least, most).
OWN_TOKENS = (20, 400)
# Between the log probabilities of the best two tokens. Rounding moves them by 1e-5.
MIN_LEAD = 0.02
PROMPTS_AT_ONCE = 16
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Prompt:
    """A prompt, and its greedy answer."""

    tokens: Tokens
    expected: Tokens


async def ask(
    session: aiohttp.ClientSession,
    server: Server,
    tokens: Tokens,
    max_tokens: int = ANSWER_TOKENS,
    **body: object,
) -> dict[str, Any]:
    """Return the only choice of a greedy completion."""
    body |= {
        "model": SERVED_MODEL,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    assert len(choice["token_ids"]) == max_tokens
    return choice


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


async def new_pool(plain: Server, size: int, chance: random.Random) -> list[Prompt]:
    """Draw `size` prompts whose answers no rounding changes, with these answers."""
    beginnings = [
        random_tokens(chance, BLOCK_TOKENS * chance.randint(*BEGINNING_BLOCKS))
        for _ in range(NUM_BEGINNINGS)
    ]
    prompts: list[Prompt] = []
    async with new_session() as session:
        while len(prompts) < size:
            drawn = [
                chance.choice(beginnings)
                + random_tokens(chance, chance.randint(*OWN_TOKENS))
                for _ in range(PROMPTS_AT_ONCE)
            ]
            answers = await asyncio.gather(
                *(_clear_answer(session, plain, tokens) for tokens in drawn)
            )
            pairs = zip(drawn, answers, strict=True)
            prompts += [Prompt(tokens, answer) for tokens, answer in pairs if answer]
    return prompts[:size]


def random_tokens(chance: random.Random, count: int) -> Tokens:
    return chance.choices(range(VOCAB_SIZE), k=count)


async def _clear_answer(
    session: aiohttp.ClientSession, plain: Server, tokens: Tokens
) -> Tokens | None:
    """Return the answer, or None if one of its tokens was hardly ahead of another."""
    choice = await ask(
        session, plain, tokens, logprobs=2, return_tokens_as_token_ids=True
    )
    for best_two in choice["logprobs"]["top_logprobs"]:
        best, next_best = sorted(best_two.values(), reverse=True)[:2]
        if best - next_best < MIN_LEAD:
            return None
    return choice["token_ids"]


# All prompts of the pool together are some 25 times what A can cache, and 12 times B.
POOL_PROMPTS = 240
A_BLOCKS = 400
B_BLOCKS = 320
AT_ONCE = 12
# Some ask twice at once.
MOST_AT_B = 2 * AT_ONCE
# Beside them A prefills prompts of its own all the time.
CHURNS = 2
CHURN_TOKENS = 1200
# B is asked at most this long after A: A's steps take about as long.
RACE_S = 0.06
RECENT = 8
RESET_EVERY_S = 10.0
CONTROL_S = 180.0


class Storm:
    """Asks B for prompts that A has, is computing, or has had."""

    def __init__(self, a: GatedServer, b: GatedServer, pool: list[Prompt]) -> None:
        self._counts: Counter[str] = Counter()
        self._a = a
        self._b = b
        self._pool = pool
        self._chance = random.Random(SEED)
        self._recent: list[Prompt] = []
        # One for each request at B.
        self._places = asyncio.Semaphore(MOST_AT_B)

    async def run(self, seconds: float, enough_wrong: int) -> Counter[str]:
        """Run until one limit is reached; return what was counted."""
        counts, began_s = self._counts, time.monotonic()

        def over() -> bool:
            return (
                counts["requests"] >= REQUESTS
                or counts["wrong"] >= enough_wrong
                or time.monotonic() - began_s >= seconds
            )

        async with new_session() as session, self._churning(session):
            await asyncio.gather(*(self._worker(session, over) for _ in range(AT_ONCE)))
        return counts

    async def _worker(
        self, session: aiohttp.ClientSession, over: Callable[[], bool]
    ) -> None:
        kinds = [self._while_a_prefills, self._after_a, self._lately_at_a, self._twice]
        while not over():
            kind = self._chance.choice(kinds)
            await kind(session, self._chance.choice(self._pool))

    async def _while_a_prefills(
        self, session: aiohttp.ClientSession, prompt: Prompt
    ) -> None:
        async def later() -> None:
            await asyncio.sleep(self._chance.uniform(0, RACE_S))
            await self._read(session, prompt)

        await asyncio.gather(self._prefill(session, prompt), later())

    async def _after_a(self, session: aiohttp.ClientSession, prompt: Prompt) -> None:
        await self._prefill(session, prompt)
        await self._read(session, prompt)

    async def _lately_at_a(
        self, session: aiohttp.ClientSession, prompt: Prompt
    ) -> None:
        await self._read(session, self._chance.choice(self._recent or [prompt]))

    async def _twice(self, session: aiohttp.ClientSession, prompt: Prompt) -> None:
        await self._prefill(session, prompt)
        await asyncio.gather(*(self._read(session, prompt) for _ in range(2)))

    async def _prefill(self, session: aiohttp.ClientSession, prompt: Prompt) -> None:
        await ask(session, self._a, prompt.tokens, max_tokens=1)
        self._recent = [*self._recent, prompt][-RECENT:]

    async def _read(self, session: aiohttp.ClientSession, prompt: Prompt) -> None:
        from_a = self._a.peer
        async with self._places:
            answer = await ask(
                session, self._b, prompt.tokens, kv_transfer_params=from_a
            )
        self._counts["requests"] += 1
        self._counts["wrong"] += answer["token_ids"] != prompt.expected

    @asynccontextmanager
    async def _churning(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Meanwhile A prefills what nobody reads, and its cache is reset at times."""

        async def churn() -> None:
            while True:
                tokens = random_tokens(self._chance, CHURN_TOKENS)
                await ask(session, self._a, tokens, max_tokens=1)

        async def reset() -> None:
            """Reset A and then B, never one alone."""
            while not over.is_set():
                try:
                    await asyncio.wait_for(over.wait(), RESET_EVERY_S)
                except TimeoutError:
                    await reset_prefix_cache(session, self._a)
                    await self._reset_b(session)

        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(churn()) for _ in range(CHURNS)]
            tasks.create_task(reset())
            yield
            over.set()
            for task in running:
                task.cancel()

    async def _reset_b(self, session: aiohttp.ClientSession) -> None:
        """Reset B while nobody asks it: vLLM refuses while blocks are pulled."""
        async with AsyncExitStack() as places:
            for _ in range(MOST_AT_B):
                await places.enter_async_context(self._places)
            await self._b.settle()
            await reset_prefix_cache(session, self._b)


async def reset_prefix_cache(
    session: aiohttp.ClientSession, server: GatedServer
) -> None:
    url = f"{server.url}/reset_prefix_cache"
    async with session.post(url, params={"reset_running_requests": "true"}) as done:
        done.raise_for_status()


@dataclass(frozen=True)
class Pair:
    """A and B, and the prompts that both get."""

    a: GatedServer
    b: GatedServer
    pool: list[Prompt]

    async def storm(self, seconds: float, enough_wrong: int) -> Counter[str]:
        """Run a storm on two empty caches."""
        async with new_session() as session:
            for each in (self.a, self.b):
                await each.settle()
                await reset_prefix_cache(session, each)
        return await Storm(self.a, self.b, self.pool).run(seconds, enough_wrong)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    require_honest_transfers()
    folder: Path = tmp_path_factory.mktemp("storm")
    lab = TinyServers(folder)
    with ready(lab.instance()) as (plain,):
        pool = asyncio.run(new_pool(plain, POOL_PROMPTS, random.Random(SEED)))
    overlay = direct_read_overlay(lab)
    with ready(
        GatedServer(lab, overlay, "a", num_blocks=A_BLOCKS),
        GatedServer(lab, overlay, "b", num_blocks=B_BLOCKS),
    ) as (a, b):
        yield Pair(a, b, pool)


def test_no_answer_is_wrong_and_blocks_are_pulled(pair: Pair):
    async def run() -> tuple[Counter[str], int]:
        before = await pair.b.count("blocks_pulled")
        counts = await pair.storm(MOST_S, enough_wrong=1)
        await pair.b.settle()
        return counts, await pair.b.count("blocks_pulled") - before

    counts, pulled = asyncio.run(run())
    assert counts["wrong"] == 0
    assert counts["requests"] > 100 and pulled > 100


@pytest.mark.parametrize("switch", [OFFER_IN_FLIGHT, TRUST_ALL])
def test_answers_are_wrong_without_a_safety_measure(switch: str, pair: Pair):
    server = pair.a if switch == OFFER_IN_FLIGHT else pair.b
    server.close_gate(switch)
    try:
        counts = asyncio.run(pair.storm(CONTROL_S, enough_wrong=1))
    finally:
        server.open_gate(switch)
    assert counts["wrong"]
