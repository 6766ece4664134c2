# SPDX-License-Identifier: Apache-2.0
"""Sends a replayed request over HTTP, and reads what its answer says besides tokens."""

from __future__ import annotations

import os

import aiohttp

from fleet.replay.records import STOPPED
from lab.load.client import Client
from lab.load.sse import Usage
from lab.records.replay import ReplayedRequest, in_header


class ReplayClient(Client):
    """Sends the requests of a trace to one server, ours or any other."""

    stopped = STOPPED

    async def send(self, record: ReplayedRequest, body: bytes) -> None:
        """Fill in the record to its end, whatever happens."""
        headers = {
            "X-Session-Id": in_header(record.session),
            "X-Request-Id": in_header(record.id),
        }
        await self.request(record, body, headers | authorization())

    def take_head(
        self, record: ReplayedRequest, response: aiohttp.ClientResponse
    ) -> None:
        super().take_head(record, response)
        record.instance = response.headers.get("X-Kvtax-Instance")
        record.prefill_instance = response.headers.get("X-Kvtax-Prefill")

    def take_usage(self, record: ReplayedRequest, usage: Usage) -> None:
        record.usage_prompt_tokens = usage.prompt_tokens
        record.usage_completion_tokens = usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
        usage.check(record.input_tokens, record.output_tokens)


def authorization() -> dict[str, str]:
    """The header for a server that wants a key, from OPENAI_API_KEY."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
