# SPDX-License-Identifier: Apache-2.0
"""KV that moves from a P to a D instance: only the waiting for it, over HTTP.

P holds the result of a prefill under its transfer id, and hands it over at `/kv/<id>`.
D requests it there, at the address in its own request: `remote_bootstrap_addr` as with
Mooncake, or `remote_host` and `remote_port` of P's answer as with NIXL. A D that gets
nothing waits, as vLLM does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp


class Transfers:
    """Both sides of one instance."""

    def __init__(self, engine_id: str, us_per_token: float) -> None:
        self.engine_id = engine_id
        self.host, self.port = "", 0  # its own, set once it listens
        self._us_per_token = us_per_token
        self._ready: dict[str, asyncio.Future[int]] = {}

    def offer(self, transfer_id: str, prompt_tokens: int) -> dict[str, Any]:
        """Hand over the KV of a finished prefill; return the parameters for D."""
        future = self._future(transfer_id)
        if not future.done():
            future.set_result(prompt_tokens)
        return {
            **self.address(transfer_id),
            "do_remote_prefill": True,
            "do_remote_decode": False,
        }

    def address(self, transfer_id: str) -> dict[str, Any]:
        return {
            "transfer_id": transfer_id,
            "remote_engine_id": self.engine_id,
            "remote_request_id": transfer_id,
            "remote_block_ids": [],
            "remote_host": self.host,
            "remote_port": self.port,
        }

    async def collect(self, transfer_id: str) -> int:
        """Return the prompt tokens of the KV, once it is there: P's side of a pull."""
        try:
            return await asyncio.shield(self._future(transfer_id))
        finally:
            self._ready.pop(transfer_id, None)

    async def pull(self, params: dict[str, Any]) -> int:
        """Wait for the KV and its way here; return its tokens: D's side of a pull."""
        address = params.get("remote_bootstrap_addr")
        if address is None:
            address = f"http://{params['remote_host']}:{params['remote_port']}"
        transfer_id = params.get("transfer_id") or params["remote_request_id"]
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{address}/kv/{transfer_id}") as response,
            ):
                response.raise_for_status()
                tokens = int(await response.text())
        except aiohttp.ClientError:
            await asyncio.Event().wait()  # P is gone: nothing will ever come
        await asyncio.sleep(tokens * self._us_per_token / 1e6)
        return tokens

    def _future(self, transfer_id: str) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        return self._ready.setdefault(transfer_id, loop.create_future())
