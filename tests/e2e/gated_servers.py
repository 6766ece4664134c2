# SPDX-License-Identifier: Apache-2.0
"""Servers that read each other's memory, held at the moments that a caller picks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvtax.engine.connector import Connector
from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import SERVED_MODEL, Server, resolve
from tests.e2e.gates import GATES_VARIABLE
from tests.harness.tiny import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    NUM_BLOCKS,
    SETTLE_DEADLINE_S,
    TinyServer,
    TinyServers,
    tiny_settings,
)

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
PROGRESS_TIMEOUT_S = 3

KV_TRANSFER_CONFIG = {
    "kv_connector": "GatedDirectReadConnector",
    "kv_connector_module_path": "tests.e2e.gated_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
}


class GatedServer(TinyServer):
    """A server with the gated connector; starts when made.

    Args:
        num_blocks: Size of its KV cache, which limits the length of prompts.
        name_of_model: What the fingerprint holds; clients can always ask for "model".
        multi: Put the connector into a MultiConnector, beside one that does nothing.
    """

    def __init__(
        self,
        lab: TinyServers,
        overlay: Path,
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
        spec = resolve(
            Connector("", [], kv_transfer_config=config),
            tiny_settings(
                min(MAX_TOKENS, (num_blocks - 1) * BLOCK_TOKENS), 8, num_blocks
            ),
            checkpoint or lab.checkpoint,
            folder,
            {},
            overlay=overlay,
        ).with_options(
            *("--served-model-name", name_of_model, SERVED_MODEL),
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
        """Return once a request waits at the gate."""
        reached = self.gates / f"{name}.reached"
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        while not reached.exists():
            assert time.monotonic() < deadline_s, f"nobody came to {name}"
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def held_at(self, name: str, request: Awaitable) -> AsyncIterator:
        """Run the request until this server waits at the gate; on leaving, open it."""
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
        """Return once that share of the KV cache is in use."""
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


def direct_read_overlay(lab: TinyServers) -> Path:
    overlay = lab.folder / "direct_read"
    build_overlay(overlay, PATCHES, {})
    return overlay
