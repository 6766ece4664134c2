# SPDX-License-Identifier: Apache-2.0
"""A storm on two real engines: B reads from A while A prefills, evicts and is reset.

B takes A's blocks only while both were reset as often. So B is reset after A, when it
has answered what it was asked; until then it computes.

Every token that B answers with is compared with a plain instance's. After the run
proper the same load goes on without in-flight exclusion, and then without validation:
those two must give wrong tokens, or the storm would prove nothing.

Prints Markdown and writes it with JSON. Exits with 1 if a token was wrong, or if a
control had no wrong token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from connectors.direct_read.bench.gated_servers import (
    PATCHES,
    GatedServer,
    direct_read_overlay,
)
from connectors.direct_read.bench.gates import OFFER_IN_FLIGHT, TRUST_ALL
from kvtax import patcher
from kvtax.engine.preflight import require_honest_transfers
from kvtax.engine.server import SERVED_MODEL, Server
from kvtax.paths import PATCHES as PATCH_FOLDER
from kvtax.report.markdown import table
from studies.results import NotMeasured, publish
from tests.harness.tiny import BLOCK_TOKENS, VOCAB_SIZE, TinyServers, Tokens, ready

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
                for _ in range(PROMPTS_AT_ONCE)
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
ENOUGH_WRONG = 20
CONTROL_S = 180.0


class Storm:
    """Asks B for prompts that A has, is computing, or has had."""

    def __init__(self, a: GatedServer, b: GatedServer, pool: Pool, seed: int) -> None:
        self._counts: Counter[str] = Counter()
        self._a = a
        self._b = b
        self._pool = pool
        self._chance = random.Random(seed)
        self._recent: list[Prompt] = []
        # One for each request at B.
        self._places = asyncio.Semaphore(MOST_AT_B)

    async def run(self, requests: int, seconds: float, enough_wrong: int) -> Counts:
        """Run until one limit is reached; what was counted.

        Names as in report.ROWS.
        """
        counts = self._counts
        before = await self._counters()
        began_s = time.monotonic()

        def over() -> bool:
            return (
                counts["requests"] >= requests
                or counts["wrong_requests"] >= enough_wrong
                or time.monotonic() - began_s >= seconds
            )

        async with new_session() as session, self._churning(session):
            await asyncio.gather(*(self._worker(session, over) for _ in range(AT_ONCE)))
        since = await self._counters() - before
        took_s = round(time.monotonic() - began_s, 1)
        return dict(counts) | dict(since) | {"seconds": took_s}

    async def _worker(self, session: aiohttp.ClientSession, over) -> None:
        kinds = [self._while_a_prefills, self._after_a, self._lately_at_a, self._twice]
        while not over():
            kind = self._chance.choice(kinds)
            self._counts[kind.__name__.strip("_")] += 1
            await kind(session, self._chance.choice(self._pool.prompts))

    async def _while_a_prefills(self, session, prompt: Prompt) -> None:
        async def later() -> None:
            await asyncio.sleep(self._chance.uniform(0, RACE_S))
            await self._read(session, prompt)

        await asyncio.gather(self._prefill(session, prompt), later())

    async def _after_a(self, session, prompt: Prompt) -> None:
        await self._prefill(session, prompt)
        await self._read(session, prompt)

    async def _lately_at_a(self, session, prompt: Prompt) -> None:
        await self._read(session, self._chance.choice(self._recent or [prompt]))

    async def _twice(self, session, prompt: Prompt) -> None:
        await self._prefill(session, prompt)
        await asyncio.gather(*(self._read(session, prompt) for _ in range(2)))

    async def _prefill(self, session, prompt: Prompt) -> None:
        await ask(session, self._a, prompt.tokens, max_tokens=1)
        self._recent = [*self._recent, prompt][-RECENT:]

    async def _read(self, session, prompt: Prompt) -> None:
        from_a = self._a.peer
        async with self._places:
            answer = await ask(
                session, self._b, prompt.tokens, kv_transfer_params=from_a
            )
        pairs = zip(answer["token_ids"], prompt.expected, strict=True)
        wrong_tokens = sum(token != expected for token, expected in pairs)
        self._counts["requests"] += 1
        self._counts["wrong_tokens"] += wrong_tokens
        self._counts["wrong_requests"] += wrong_tokens > 0

    @asynccontextmanager
    async def _churning(self, session: aiohttp.ClientSession):
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
                    self._counts["resets"] += 1

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

    async def _counters(self) -> Counter[str]:
        """What the connectors of A and B counted, by name without its prefix."""
        counted: Counter[str] = Counter()
        for server in (self._b, self._a):
            # One more step shows what was counted last.
            await server.settle()
            async with (
                new_session() as session,
                session.get(f"{server.url}/metrics") as response,
            ):
                text = await response.text()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = sample.name.removeprefix("vllm:direct_read_")
                    if name != sample.name and name.endswith("_total"):
                        counted[name.removesuffix("_total")] += int(sample.value)
        return counted


async def reset_prefix_cache(
    session: aiohttp.ClientSession, server: GatedServer
) -> None:
    url = f"{server.url}/reset_prefix_cache"
    async with session.post(url, params={"reset_running_requests": "true"}) as done:
        done.raise_for_status()


@contextmanager
def without(server: GatedServer | None, switch: str):
    """With a safety measure off, at the server that has it."""
    if server is None:
        yield
        return
    server.close_gate(switch)
    try:
        yield
    finally:
        server.open_gate(switch)


async def storm(
    a: GatedServer, b: GatedServer, pool: Pool, seed: int, requests: int, seconds: float
) -> dict[str, Counts]:
    """The run proper, then the controls; both begin each with an empty cache."""
    phases = {
        AS_IT_IS: (None, "", requests, seconds, requests),
        "without exclusion": (a, OFFER_IN_FLIGHT, requests, CONTROL_S, ENOUGH_WRONG),
        "without validation": (b, TRUST_ALL, requests, CONTROL_S, ENOUGH_WRONG),
    }
    found = {}
    for name, (server, switch, most, limit_s, enough) in phases.items():
        async with new_session() as session:
            for each in (a, b):
                await each.settle()
                await reset_prefix_cache(session, each)
        with without(server, switch):
            found[name] = await Storm(a, b, pool, seed).run(most, limit_s, enough)
        print(f"{name}: {found[name]}", flush=True)
    return found


AS_IT_IS = "as it is"
# The rows, by the name of the count; the connector's own counts are in its metrics.py.
ROWS = {
    "requests": "requests at B",
    "wrong_requests": "**answers with a wrong token**",
    "wrong_tokens": "wrong tokens",
    "while_a_prefills": "asked while A prefills the prompt",
    "after_a": "asked when A has just answered it",
    "lately_at_a": "asked some answers later",
    "twice": "asked twice at once",
    "resets": "resets of A's prefix cache, and of B's after it",
    "lookups": "lookups",
    "lookup_failures": "of them failed",
    "served_in_flight": "stopped at a block still being computed",
    "blocks_offered": "blocks offered",
    "pulls": "pulls",
    "pulls_cut_short": "of them cut short",
    "blocks_pulled": "blocks pulled, and accepted",
    "blocks_rejected": "blocks read, and rejected as evicted",
    "blocks_unread": "blocks offered, and not read",
    "seconds": "seconds",
}

Counts = dict[str, float]


def report(
    seed: int, pool: Mapping[str, float], phases: dict[str, Counts]
) -> list[str]:
    """Return the parts of the page."""
    rows = [
        [what, *(f"{counts.get(name, 0):,.0f}" for counts in phases.values())]
        for name, what in ROWS.items()
    ]
    return [
        "Instance B reads from A while A prefills, evicts and loses its prefix cache. "
        "Each greedy answer of B is compared with a plain instance's. The controls "
        "have the same load, with one safety measure switched off, until enough "
        "answers were wrong: what was pulled wrong stays in B's prefix cache and can "
        f"hurt more than one request. Seed {seed}.",
        table(["", *phases], rows),
        f"The oracle: of {pool['prompts']:,.0f} prompts, {pool['seen']:,.0f} had "
        "another answer when one of their blocks was replaced. What is wrong and "
        "changes no token is not seen.",
    ]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench direct_read_storm`."""
    parser.add_argument("--requests", type=int, default=10_000, help="at B")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and moments")
    parser.add_argument("--out", type=Path, default=Path("runs/direct_read_storm.md"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    require_honest_transfers()
    with tempfile.TemporaryDirectory(prefix="kvtax-storm-") as folder:
        lab = TinyServers(Path(folder))
        with ready(lab.instance()) as (plain,):
            pool = asyncio.run(new_pool(plain, POOL_PROMPTS, arguments.seed))
        print(f"{pool.seen} of {len(pool.prompts)} see one wrong block", flush=True)
        overlay = direct_read_overlay(lab)
        with ready(
            GatedServer(lab, overlay, "a", num_blocks=A_BLOCKS),
            GatedServer(lab, overlay, "b", num_blocks=B_BLOCKS),
        ) as (a, b):
            ends = arguments.requests, arguments.minutes * 60
            phases = asyncio.run(storm(a, b, pool, arguments.seed, *ends))
    oracle = {"prompts": len(pool.prompts), "seen": pool.seen}
    patches = patcher.load_patches(PATCH_FOLDER)
    hashes = {name: patcher.patch_hash(patches[name]) for name in PATCHES}
    parts = report(arguments.seed, oracle, phases)
    results = {"seed": arguments.seed, "pool": oracle, "phases": phases}
    publish("direct_read_storm", arguments.out, parts, results, hashes)
    wrong = {name: counts.get("wrong_requests", 0) for name, counts in phases.items()}
    return 0 if wrong.pop(AS_IT_IS) == 0 and all(wrong.values()) else 1
