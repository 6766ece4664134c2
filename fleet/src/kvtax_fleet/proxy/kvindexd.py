# SPDX-License-Identifier: Apache-2.0
"""Exact cache state of the instances, looked up in a kvindexd that follows KV events.

kvindexd takes a prompt as the client's bytes, so that no token id is parsed here. When
it does not answer, requests go by the mirror, and it is left alone for a moment. One
request may be all that it does not answer, so a prompt of one token is looked up first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from yarl import URL

from kvtax_fleet.proxy.apis import UNREADABLE
from kvtax_fleet.proxy.body import RequestBody
from kvtax_fleet.proxy.settings import SettingsError
from kvtax_fleet.records.instances import unusable

TIMEOUT_S = 1.0
# Seconds, below the 120 after which kvindexd closes an idle connection.
KEEPALIVE_S = 60.0
# Seconds without look-ups after an error, lest request after request waits.
PAUSE_S = 1.0
ERRORS = (OSError, aiohttp.ClientError, *UNREADABLE)
# Statuses with which a request is refused that is at fault itself.
REFUSALS = frozenset({400, 413, 414, 431})
# Bytes of a query, above which the request goes as JSON, and of a prompt, above which
# it is not looked up: kvindexd takes no more by default.
MAX_QUERY_BYTES = 2048
MAX_PROMPT_BYTES = 15 * 2**20
# Any prompt that every kvindexd answers.
_ANY_PROMPT = b"[1]"
log = logging.getLogger(__name__)


class Holding(msgspec.Struct):
    """The prompt's leading tokens that an instance has cached."""

    name: str
    tokens: int


class Holdings(msgspec.Struct):
    instances: list[Holding]


class Batch(msgspec.Struct):
    answers: list[Holdings]


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
_batch = msgspec.json.Decoder(Batch).decode
_states = msgspec.json.Decoder(States).decode
_string = msgspec.json.Decoder(str).decode


class Kvindexd:
    """A running kvindexd; `names` are the instances in the order of its answers.

    `unanswered` counts prompts whose look-up failed.
    """

    def __init__(
        self,
        address: str,
        names: Sequence[str],
    ) -> None:
        """Take the address: unix:///PATH or tcp://HOST:PORT. Raises SettingsError."""
        scheme, _, where = address.partition("://")
        if scheme not in ("unix", "tcp") or not where:
            raise SettingsError(
                f"--kvindexd {address}: unix:///PATH or tcp://HOST:PORT is needed"
            )
        self._socket = where if scheme == "unix" else None
        self._url = "http://kvindexd" if self._socket else f"http://{where}"
        if scheme != "unix" and (why := unusable(self._url)):
            raise SettingsError(f"--kvindexd {address}: {why}")
        self._address = address
        self._names = names
        self._not_before_s = 0.0
        self.unanswered = 0

    async def __aenter__(self) -> Kvindexd:
        """Raise SettingsError if it does not answer, or follows other instances."""
        self._session = aiohttp.ClientSession(
            connector=self._connector(),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            headers={"Content-Type": "application/json"},
        )
        try:
            await self.follow(self._names)
        except BaseException:
            await self._session.close()
            raise
        return self

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket is not None:
            return aiohttp.UnixConnector(
                self._socket, limit=0, keepalive_timeout=KEEPALIVE_S
            )
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)

    async def follow(self, names: Sequence[str]) -> None:
        """Replace the instances.

        Raises SettingsError if it does not answer, or follows others.
        """
        try:
            states = await self._read_states()
            await self._look_up_any()
        except ERRORS as error:
            raise SettingsError(
                f"no kvindexd answers at {self._address} ({error!r}): start it without "
                "-token-file, or correct --kvindexd"
            ) from None
        if unknown := [name for name in names if name not in states]:
            raise SettingsError(
                f"the kvindexd at {self._address} does not follow {unknown[0]!r}: give "
                "it and the proxy the same instances file"
            )
        self._names = names

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def cached_tokens(self, body: RequestBody[Any]) -> dict[str, int] | None:
        """Look a prompt up: unknown without token ids, and without an answer."""
        if not body.has_ids or len(body.prompt) > MAX_PROMPT_BYTES:
            return None
        if time.monotonic() < self._not_before_s:
            self.unanswered += 1
            return None
        try:
            return await self._look_up(body)
        except ERRORS as error:
            self.unanswered += 1
            log.warning("kvindexd at %s: %r", self._address, error)
            await self._pause_unless_answered()
            return None

    async def _pause_unless_answered(self) -> None:
        """Look nothing up for a while, unless the service answers another request."""
        self._not_before_s = time.monotonic() + TIMEOUT_S + PAUSE_S
        try:
            await self._look_up_any()
        except ERRORS:
            self._not_before_s = time.monotonic() + PAUSE_S
        else:
            self._not_before_s = 0.0

    async def states(self) -> dict[str, State]:
        """Return the state of each instance; empty without an answer."""
        try:
            return await self._read_states()
        except ERRORS as error:
            log.warning("kvindexd at %s: %r", self._address, error)
            return {}

    async def _look_up(self, body: RequestBody[Any]) -> dict[str, int] | None:
        """Return None for a prompt that kvindexd refuses: vLLM reports the reason."""
        fields = {name: body.text(name) for name in ("model", "cache_salt")}
        query = {
            name: _string(text) for name, text in fields.items() if text[:1] == b'"'
        }
        if len(encoded := urlencode(query)) <= MAX_QUERY_BYTES:
            path = f"/v1/lookup?{encoded}"
            status, text = await self._request("POST", path, body.prompt)
        else:
            prompt = {**query, "token_ids": msgspec.Raw(body.prompt)}
            batch = msgspec.json.encode({"prompts": [prompt]})
            status, text = await self._request("POST", "/v1/lookup", batch)
        if status in REFUSALS:
            return None
        several = len(encoded) > MAX_QUERY_BYTES
        found = _batch(text).answers[0] if several else _holdings(text)
        tokens = {holding.name: holding.tokens for holding in found.instances}
        return {name: tokens.get(name, 0) for name in self._names}

    async def _look_up_any(self) -> None:
        _holdings((await self._request("POST", "/v1/lookup", _ANY_PROMPT))[1])

    async def _read_states(self) -> dict[str, State]:
        _, text = await self._request("GET", "/healthz")
        return {state.name: state for state in _states(text).instances}

    async def _request(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        url = URL(self._url + path, encoded=True)
        async with self._session.request(method, url, data=body or None) as answer:
            text = await answer.read()
        if answer.status != 200 and answer.status not in REFUSALS:
            raise OSError(f"HTTP {answer.status}")
        return answer.status, text
