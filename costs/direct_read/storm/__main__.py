# SPDX-License-Identifier: Apache-2.0
"""A storm on two real engines: B reads from A while A prefills, evicts and is reset.

Every token that B answers with is compared with a plain instance's. After the run
proper the same load goes on without in-flight exclusion, and then without validation:
those two must give wrong tokens, or the storm would prove nothing.

The run is added to those in --out, a JSON file, and the sum of all runs is written
beside it in Markdown. Exits with 1 if a token was wrong, or if a control had no wrong
token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from costs.direct_read.engines import GatedServer, direct_read_tree
from costs.direct_read.gates import OFFER_IN_FLIGHT, TRUST_ALL
from costs.direct_read.storm.pool import (
    Pool,
    Prompt,
    ask,
    new_pool,
    new_session,
    random_tokens,
)
from costs.direct_read.storm.report import AS_IT_IS, Counts, add_run
from lab.serving.preflight import require_honest_transfers
from lab.serving.supervise import exit_on_signals
from lab.tiny.servers import TinyServers, ready

# All prompts of the pool together are some 25 times what A can cache, and 12 times B.
POOL_PROMPTS = 240
A_BLOCKS = 400
B_BLOCKS = 320
AT_ONCE = 12
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
        params = {"kv_transfer_params": self._a.peer}
        answer = await ask(session, self._b, prompt.tokens, **params)
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
            while True:
                await asyncio.sleep(RESET_EVERY_S)
                await reset_prefix_cache(session, self._a)
                self._counts["resets"] += 1

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(churn()) for _ in range(CHURNS)]
            running.append(tasks.create_task(reset()))
            yield
            for task in running:
                task.cancel()

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
    """The run proper, then the controls; B begins each with an empty cache."""
    phases = {
        AS_IT_IS: (None, "", requests, seconds, requests),
        "without exclusion": (a, OFFER_IN_FLIGHT, requests, CONTROL_S, ENOUGH_WRONG),
        "without validation": (b, TRUST_ALL, requests, CONTROL_S, ENOUGH_WRONG),
    }
    found = {}
    for name, (server, switch, *ends) in phases.items():
        await b.settle()
        async with new_session() as session:
            await reset_prefix_cache(session, b)
        with without(server, switch):
            found[name] = await Storm(a, b, pool, seed).run(*ends)
        print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m costs.direct_read.storm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, help="at B")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and moments")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    require_honest_transfers()
    with tempfile.TemporaryDirectory(prefix="kvtax-storm-") as folder:
        lab = TinyServers(Path(folder))
        with ready(lab.instance()) as (plain,):
            pool = asyncio.run(new_pool(plain, POOL_PROMPTS, arguments.seed))
        print(f"{pool.seen} of {len(pool.prompts)} see one wrong block", flush=True)
        tree = direct_read_tree(lab)
        with ready(
            GatedServer(lab, tree, "a", num_blocks=A_BLOCKS),
            GatedServer(lab, tree, "b", num_blocks=B_BLOCKS),
        ) as (a, b):
            ends = arguments.requests, arguments.minutes * 60
            phases = asyncio.run(storm(a, b, pool, arguments.seed, *ends))
    oracle = {"prompts": len(pool.prompts), "seen": pool.seen}
    add_run(arguments.out, arguments.seed, oracle, phases)
    wrong = {name: counts.get("wrong_requests", 0) for name, counts in phases.items()}
    return 0 if wrong.pop(AS_IT_IS) == 0 and all(wrong.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
