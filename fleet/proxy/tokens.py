# SPDX-License-Identifier: Apache-2.0
"""Prompts that came as text get their token ids, beside the event loop.

Where ids cannot be told, a request goes by its bytes, its session and the load.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from .body import Body
from .chats import Unknown
from .tokenizer import Tokenizer


class Tokens:
    """`unknown` counts the prompts whose ids were not told, by reason."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # One: what the tokenizer keeps is for one thread.
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.unknown: Counter[str] = Counter()

    async def find(self, body: Body) -> None:
        """Put the ids into the body, if they are not there and can be told."""
        if body.has_ids:
            return
        try:
            body.take_ids(await self._ids(body))
        except Unknown as why:
            self.unknown[str(why)] += 1

    async def _ids(self, body: Body) -> bytes:
        if self._tokenizer is None:
            raise Unknown("no tokenizer")
        if body.form == "other":
            raise Unknown("several prompts")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._tokenizer.ids, body.api.path, body.fields
        )
