# SPDX-License-Identifier: Apache-2.0
"""The router of a prefill (P) and a decode (D) instance, for each connector."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp

from lab.tiny.server import Answer, TinyServer, Tokens


async def route(connector: str, p: TinyServer, d: TinyServer, prompt: Tokens) -> Answer:
    """D's answer to a prompt that P has prefilled. Raises RequestFailed."""
    if connector == "nixl":
        prefilled = await p.complete(prompt, 1, {"do_remote_decode": True})
        return await d.complete(prompt, kv_transfer_params=prefilled.kv_transfer_params)
    transfer_id = uuid.uuid4().hex
    pull = await pull_params(p, transfer_id)
    answer, _ = await asyncio.gather(
        d.complete(prompt, kv_transfer_params=pull),
        p.complete(prompt, 1, send_params(transfer_id)),
    )
    return answer


def send_params(transfer_id: str) -> dict[str, Any]:
    """Parameters that make a Mooncake P hold the prompt's KV until it is pulled."""
    return {"do_remote_decode": True, "transfer_id": transfer_id}


async def pull_params(p: TinyServer, transfer_id: str) -> dict[str, Any]:
    """Parameters that make a Mooncake D pull from `p`, from its bootstrap server."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{p.bootstrap_url}/query") as answer,
    ):
        ranks = await answer.json()
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": p.bootstrap_url,
        "remote_engine_id": ranks["0"]["engine_id"],
    }
