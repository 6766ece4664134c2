# SPDX-License-Identifier: Apache-2.0
"""What the instances really have cached: a kvindexd is asked, which follows KV events.

It takes a prompt as the client's bytes, so that no token id is parsed here. Where it
does not answer, requests go by the mirror, and it is left alone for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlencode

import msgspec
from multidict import CIMultiDict

from .body import Body
from .http.client import Pool
from .settings import SettingsError
from .top_level import UNREADABLE

TIMEOUT_S = 1.0
# Below the two minutes after which kvindexd closes an idle connection.
KEEPALIVE_S = 60.0
# So that requests do not wait in turn for one that hangs.
PAUSE_S = 1.0
ERRORS = (OSError, *UNREADABLE)
_JSON = CIMultiDict({"Content-Type": "application/json"})
log = logging.getLogger(__name__)


class Holding(msgspec.Struct):
    """The prompt's leading tokens that an instance has."""

    name: str
    tokens: int


class Holdings(msgspec.Struct):
    instances: list[Holding]


class State(msgspec.Struct):
    """An instance's state on /healthz; `blocks` by medium, of `block_tokens` each.

    `blocks` is None where the index cannot tell (llm-d's).
    """

    name: str
    complete: bool
    gaps: int
    skipped_blocks: int
    block_tokens: int
    blocks: dict[str, int] | None

    @property
    def tokens(self) -> int | None:
        """Held in the GPU."""
        if self.blocks is None:
            return None
        return self.blocks.get("GPU", 0) * self.block_tokens


class States(msgspec.Struct):
    instances: list[State]


_holdings = msgspec.json.Decoder(Holdings).decode
_states = msgspec.json.Decoder(States).decode
_string = msgspec.json.Decoder(str).decode


class Exact(Protocol):
    """Who knows what the instances have cached."""

    async def cached_tokens(self, body: Body) -> list[int] | None:
        """For each instance, the tokens of the prompt's longest cached prefix.

        None where they are not known. At most all but the last token: vLLM computes
        at least one.
        """


class Kvindexd:
    """`names` are the instances in the order of answers.

    `unanswered` counts prompts that should have been looked up and were not.
    """

    def __init__(self, address: str, names: Sequence[str]) -> None:
        """`address` as kvindexd prints it: unix:///PATH or tcp://HOST:PORT.

        Raises SettingsError.
        """
        scheme, _, where = address.partition("://")
        if scheme not in ("unix", "tcp") or not where:
            raise SettingsError(
                f"--kvindexd {address}: unix:///PATH or tcp://HOST:PORT is needed"
            )
        self._address = address
        self._names = names
        self._url = address if scheme == "unix" else f"http://{where}"
        self._not_before_s = 0.0
        self.unanswered = 0

    async def __aenter__(self) -> Kvindexd:
        """Raises SettingsError if it does not answer, or knows other instances."""
        self._pool = Pool(TIMEOUT_S, TIMEOUT_S, KEEPALIVE_S)
        try:
            states = await self._ask_states()
        except ERRORS as error:
            self._pool.close()
            raise SettingsError(
                f"no kvindexd answers at {self._address}: {error!r}"
            ) from None
        if unknown := [name for name in self._names if name not in states]:
            self._pool.close()
            raise SettingsError(
                f"the kvindexd at {self._address} does not follow {unknown[0]!r}: give "
                "it and the proxy the same instances file"
            )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._pool.close()

    async def cached_tokens(self, body: Body) -> list[int] | None:
        """As Exact says: not known without token ids, nor without an answer."""
        if not body.has_ids:
            return None
        if time.monotonic() < self._not_before_s:
            self.unanswered += 1
            return None
        try:
            return await self._ask(body)
        except ERRORS as error:
            log.warning("kvindexd at %s: %r", self._address, error)
            self._not_before_s = time.monotonic() + PAUSE_S
            self.unanswered += 1
            return None

    async def states(self) -> dict[str, State]:
        """By instance; empty without an answer."""
        try:
            return await self._ask_states()
        except ERRORS as error:
            log.warning("kvindexd at %s: %r", self._address, error)
            return {}

    async def _ask(self, body: Body) -> list[int] | None:
        """None for a prompt that it refuses: what is wrong is for vLLM to say."""
        given = {name: body.text(name) for name in ("model", "cache_salt")}
        asked = {
            name: _string(text) for name, text in given.items() if text[:1] == b'"'
        }
        path = f"/v1/lookup?{urlencode(asked)}"
        status, text = await self._answer("POST", path, body.prompt)
        if status in (400, 413):
            return None
        tokens = {one.name: one.tokens for one in _holdings(text).instances}
        return [tokens.get(name, 0) for name in self._names]

    async def _ask_states(self) -> dict[str, State]:
        _, text = await self._answer("GET", "/healthz")
        return {one.name: one for one in _states(text).instances}

    async def _answer(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Status and body. Raises one of ERRORS."""
        async with asyncio.timeout(TIMEOUT_S):
            answer = await self._pool.request(method, self._url, path, _JSON, body)
            try:
                text = await answer.read()
            finally:
                answer.close()
        if answer.status not in (200, 400, 413):
            raise OSError(f"HTTP {answer.status}")
        return answer.status, text
