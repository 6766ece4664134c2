# SPDX-License-Identifier: Apache-2.0
"""Exact cache state of the instances, looked up in a kvindexd that follows KV events.

kvindexd takes a prompt as the client's bytes, so that no token id is parsed here. When
it does not answer, requests go by the mirror, and it is left alone for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
from multidict import CIMultiDict

from .apis import UNREADABLE
from .body import Payload, RequestBody
from .http_client import Pool
from .settings import SettingsError

TIMEOUT_S = 1.0
# Seconds, below the 120 after which kvindexd closes an idle connection.
KEEPALIVE_S = 60.0
# Seconds without look-ups after an error, lest request after request waits.
PAUSE_S = 1.0
ERRORS = (OSError, *UNREADABLE)
_JSON = CIMultiDict({"Content-Type": "application/json"})
log = logging.getLogger(__name__)


class Holding(msgspec.Struct):
    """The prompt's leading tokens that an instance has cached."""

    name: str
    tokens: int


class Holdings(msgspec.Struct):
    instances: list[Holding]


class State(msgspec.Struct):
    """An instance's state on /healthz; `blocks` by medium, of `block_tokens` each.

    `blocks` is None for an index that does not count them (llm-d's).
    """

    name: str
    complete: bool
    gaps: int
    skipped_blocks: int
    block_tokens: int
    blocks: dict[str, int] | None

    @property
    def tokens(self) -> int | None:
        """Tokens cached in the GPU."""
        if self.blocks is None:
            return None
        return self.blocks.get("GPU", 0) * self.block_tokens


class States(msgspec.Struct):
    instances: list[State]


_holdings = msgspec.json.Decoder(Holdings).decode
_states = msgspec.json.Decoder(States).decode
_string = msgspec.json.Decoder(str).decode


class Exact(Protocol[Payload]):
    """A source of the exact cache state."""

    async def cached_tokens(self, body: RequestBody[Payload]) -> list[int] | None:
        """Return the tokens of the prompt's longest cached prefix for each instance.

        None where they are unknown. At most all but the last token: vLLM computes at
        least one.
        """


class Kvindexd:
    """A running kvindexd; `names` are the instances in the order of its answers.

    `unanswered` counts prompts whose look-up failed.
    """

    def __init__(self, address: str, names: Sequence[str]) -> None:
        """Take the address that kvindexd prints: unix:///PATH or tcp://HOST:PORT.

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
        """Raise SettingsError if it does not answer, or follows other instances."""
        self._pool = Pool(TIMEOUT_S, TIMEOUT_S, KEEPALIVE_S)
        try:
            states = await self._read_states()
        except ERRORS as error:
            self._pool.close()
            raise SettingsError(
                f"no kvindexd answers at {self._address} ({error!r}): start it, or "
                "correct --kvindexd"
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

    async def cached_tokens(self, body: RequestBody[Any]) -> list[int] | None:
        """Look a prompt up: unknown without token ids, and without an answer."""
        if not body.has_ids:
            return None
        if time.monotonic() < self._not_before_s:
            self.unanswered += 1
            return None
        try:
            return await self._look_up(body)
        except ERRORS as error:
            log.warning("kvindexd at %s: %r", self._address, error)
            self._not_before_s = time.monotonic() + PAUSE_S
            self.unanswered += 1
            return None

    async def states(self) -> dict[str, State]:
        """Return the state of each instance; empty without an answer."""
        try:
            return await self._read_states()
        except ERRORS as error:
            log.warning("kvindexd at %s: %r", self._address, error)
            return {}

    async def _look_up(self, body: RequestBody[Any]) -> list[int] | None:
        """Return None for a prompt that kvindexd refuses: vLLM reports the reason."""
        fields = {name: body.text(name) for name in ("model", "cache_salt")}
        query = {
            name: _string(text) for name, text in fields.items() if text[:1] == b'"'
        }
        path = f"/v1/lookup?{urlencode(query)}"
        status, text = await self._request("POST", path, body.prompt)
        if status in (400, 413):
            return None
        tokens = {holding.name: holding.tokens for holding in _holdings(text).instances}
        return [tokens.get(name, 0) for name in self._names]

    async def _read_states(self) -> dict[str, State]:
        _, text = await self._request("GET", "/healthz")
        return {state.name: state for state in _states(text).instances}

    async def _request(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body. Raises one of ERRORS."""
        async with asyncio.timeout(TIMEOUT_S):
            answer = await self._pool.request(method, self._url, path, _JSON, body)
            try:
                text = await answer.read()
            finally:
                answer.close()
        if answer.status not in (200, 400, 413):
            raise OSError(f"HTTP {answer.status}")
        return answer.status, text
