# SPDX-License-Identifier: Apache-2.0
"""llmd-lookup beside kvindexd: llm-d's code makes the same of the same events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from kvindexd_lab import DEADLINE_S, Engine, Index, needs_go

from fleet.proxy.apis import APIS, COMPLETIONS
from fleet.proxy.body import Body
from fleet.proxy.kvindexd import Kvindexd
from lab.serving.kvindexd import LLMD_LOOKUP

pytestmark = [pytest.mark.long, needs_go, pytest.mark.timeout(1800)]
BLOCKS, BLOCK_TOKENS = 60, 16
NAMES = ["a", "b"]


@contextmanager
def running(folder: Path) -> Iterator[tuple[list[Engine], Index, Index]]:
    """Engines, and a kvindexd and an llmd-lookup that follow them."""
    engines = [
        Engine(name, folder, str(BLOCKS), str(BLOCK_TOKENS), "sha256") for name in NAMES
    ]
    indexes: list[Index] = []
    try:
        for one in engines:
            one("free")  # it has started
        indexes.append(Index(engines, folder))
        indexes.append(Index(engines, folder, program=LLMD_LOOKUP))
        yield engines, *indexes
    finally:
        for one in [*indexes, *engines]:
            one.kill()


def said(index: Index, prompts: list[list[int]]) -> list[list[int] | None]:
    """What the proxy takes to be cached of each prompt, by instance."""

    async def ask() -> list[list[int] | None]:
        async with Kvindexd(index.address, NAMES) as asked:
            return [
                await asked.cached_tokens(
                    Body(
                        json.dumps({"model": "m", "prompt": prompt}).encode(),
                        APIS[COMPLETIONS],
                    )
                )
                for prompt in prompts
            ]

    return asyncio.run(ask())


def connected(engines: list[Engine], llmd: Index, random: Random) -> None:
    """Wait until llmd-lookup hears of what each engine caches.

    llm-d's code asks for nothing that it missed.
    """
    deadline = time.monotonic() + DEADLINE_S
    for place, engine in enumerate(engines):
        while True:
            prompt = prompt_of(random, [])
            engine("run", prompt={"ids": prompt}, output=[], stay=False)
            time.sleep(0.1)
            if said(llmd, [prompt])[0][place]:
                break
            assert time.monotonic() < deadline, f"llmd-lookup hears nothing of {place}"


def prompt_of(random: Random, begin: list[int]) -> list[int]:
    """A prompt whose last block is not whole.

    vLLM computes a whole last block again, and so holds it twice, which llm-d's index
    does not count.
    """
    more = random.randrange(1, 6) * BLOCK_TOKENS + 5 - len(begin) % BLOCK_TOKENS
    return begin + [random.randrange(1 << 20) for _ in range(more)]


def test_the_proxy_hears_the_same_tokens_from_llm_d_s_code(tmp_path: Path) -> None:
    random = Random(1)
    prompts = [prompt_of(random, [])]
    with running(tmp_path) as (engines, kvindexd, llmd):
        connected(engines, llmd, random)
        for number in range(80):
            engine = random.choice(engines)
            if number % 30 == 20:
                engine("reset")
                continue
            earlier = random.choice(prompts[-10:])
            prompt = prompt_of(random, earlier[: random.randrange(len(earlier))])
            prompts.append(prompt)
            assert engine("run", prompt={"ids": prompt}, output=[7], stay=False)
        kvindexd.wait()
        wanted = said(kvindexd, prompts)
        deadline = time.monotonic() + DEADLINE_S
        while (found := said(llmd, prompts)) != wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found == wanted
    assert sum(max(one) for one in wanted) > 1_000
    assert any(a != b for a, b in wanted)
    assert any(max(one) == 0 for one in wanted), "nothing was evicted"
