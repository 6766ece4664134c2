# SPDX-License-Identifier: Apache-2.0
"""Instances that read each other's memory, and the moments to disturb them at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from costs.direct_read.gates import GATES_VARIABLE
from lab.serving.connector import Connector
from lab.serving.server import Server
from lab.serving.server_spec import SERVED_MODEL, Engine, resolve
from lab.serving.tree import build_tree, installed_package
from lab.tiny.checkpoint import MAX_TOKENS, prompt
from lab.tiny.server import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    SETTLE_DEADLINE_S,
    Answer,
    TinyServer,
    Tokens,
    tiny_settings,
)
from lab.tiny.servers import Reference, TinyServers

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
SECRET = "a secret that only the tests know"
PROGRESS_TIMEOUT_S = 3

KV_TRANSFER_CONFIG = {
    "kv_connector": "GatedDirectReadConnector",
    "kv_connector_module_path": "costs.direct_read.gated",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}


class Reader(TinyServer):
    """An instance with the gated connector; starts when made.

    `num_blocks` is the size of its KV cache, and decides how long prompts can be.
    `name_of_model` is what the fingerprint has; clients can always ask for "model".
    `multi` has the connector in a MultiConnector, beside one that does nothing.
    """

    def __init__(
        self,
        lab: TinyServers,
        tree: Path,
        name: str,
        *,
        checkpoint: Path | None = None,
        num_blocks: int = NUM_BLOCKS,
        multi: bool = False,
        name_of_model: str = SERVED_MODEL,
    ) -> None:
        folder = lab.folder / name
        folder.mkdir()
        self.gates = folder / "gates"
        self.gates.mkdir()
        config = KV_TRANSFER_CONFIG
        if multi:
            config = in_multi_connector(config)
        engine = Engine(
            tree,
            tiny_settings(
                min(MAX_TOKENS, (num_blocks - 1) * BLOCK_TOKENS), 8, num_blocks
            ),
            Connector("", [], kv_transfer_config=config),
            checkpoint or lab.checkpoint,
        )
        spec = resolve(engine, folder, {}).told(
            *("--served-model-name", name_of_model, SERVED_MODEL),
            DIRECT_READ_SECRET=SECRET,
            MC_TCP_PROGRESS_TIMEOUT_SEC=str(PROGRESS_TIMEOUT_S),
            **{GATES_VARIABLE: str(self.gates)},
        )
        self.peer = named(spec.ports.direct_read)
        Server.__init__(self, spec)

    def close_gate(self, name: str) -> None:
        (self.gates / f"{name}.reached").unlink(missing_ok=True)
        (self.gates / name).touch()

    def open_gate(self, name: str) -> None:
        (self.gates / name).unlink(missing_ok=True)

    async def reaches(self, name: str) -> None:
        """Returns once somebody waits at the gate."""
        reached = self.gates / f"{name}.reached"
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        while not reached.exists():
            assert time.monotonic() < deadline_s, f"nobody came to {name}"
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def held_at(self, name: str, request: Awaitable) -> AsyncIterator:
        """The request under way, and this instance at the gate."""
        self.close_gate(name)
        task = asyncio.ensure_future(request)
        try:
            await self.reaches(name)
            yield task
        finally:
            self.open_gate(name)

    async def count(self, name: str) -> int:
        """The connector's counter of this name, as of the last step."""
        return int(await self.metric(f"vllm:direct_read_{name}_total"))

    async def has_used(self, share: float) -> None:
        """Returns once so much of the KV cache is in use."""
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        while (used := await self.metric("vllm:kv_cache_usage_perc")) < share - 1e-6:
            assert time.monotonic() < deadline_s, f"{used} used, not {share}"
            await asyncio.sleep(0.02)

    async def metric(self, name: str) -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/metrics") as response,
        ):
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )


def named(port: int) -> dict[str, Any]:
    """kv_transfer_params that name the peer at this port."""
    return {"direct_read": {"host": "127.0.0.1", "port": port}}


def in_multi_connector(config: dict[str, Any]) -> dict[str, Any]:
    noop = {
        "kv_connector": "NoopConnector",
        "kv_connector_module_path": "connectors.noop",
        "kv_role": "kv_both",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [noop, config]},
    }


def direct_read_tree(lab: TinyServers) -> Path:
    tree = lab.folder / "direct_read"
    build_tree(tree, installed_package("vllm"), PATCHES, {})
    return tree


@dataclass(frozen=True)
class ReadBench:
    """`b` reads from `a`; `foreign` has other weights under another name.

    `a` has its connector in a MultiConnector, and a small cache; `b` has the same
    checkpoint at another path.
    """

    a: Reader
    b: Reader
    foreign: Reader
    reference: Reference

    async def prepare(self, asked: Tokens) -> None:
        """Have A cache it, and the reference know what follows."""
        await asyncio.gather(self.reference.tokens([asked]), self.a.complete(asked, 1))

    def ask(self, asked: Tokens, peer: dict[str, Any] | None = None) -> Awaitable:
        return self.b.complete(asked, kv_transfer_params=peer or self.a.peer)

    async def right(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens == expected

    async def wrong(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        """For negative controls."""
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens != expected

    @asynccontextmanager
    async def pulled(self, blocks: int) -> AsyncIterator[None]:
        """B has pulled so many blocks, as vLLM counts and as the connector does."""
        before = await self.counted()
        yield
        await self.b.settle()
        since = [
            now - then for now, then in zip(await self.counted(), before, strict=True)
        ]
        assert since == [blocks * BLOCK_TOKENS, blocks], f"{since} of {blocks} blocks"

    async def counted(self) -> tuple[int, int]:
        """Tokens that B has pulled, and blocks."""
        pulled_tokens = (await self.b.counters()).pulled_tokens
        return pulled_tokens, await self.b.count("blocks_pulled")

    async def well(self, seed: int) -> None:
        """B holds nothing, and reads from A: the first time unless A has failed it.

        Then it leaves A alone for a while, and so may Mooncake.
        """
        await self.b.settle()
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        pulled = 0
        while not pulled:
            assert time.monotonic() < deadline_s
            seed += 1
            asked = prompt(seed, 500)
            await self.prepare(asked)
            before, _ = await self.counted()
            await self.right(self.ask(asked), asked)
            await self.b.settle()
            pulled = (await self.counted())[0] - before
        assert pulled == full_blocks(asked) * BLOCK_TOKENS


def full_blocks(asked: Tokens) -> int:
    """How many blocks of it can be pulled: the last token is computed."""
    return (len(asked) - 1) // BLOCK_TOKENS
