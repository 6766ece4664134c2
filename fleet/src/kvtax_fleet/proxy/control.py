# SPDX-License-Identifier: Apache-2.0
"""The control surface: health, metrics and decisions, for operators only.

It has an address of its own. Decisions name sessions, and the rest names instances: an
address that others than this machine reach needs a token.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec
from multidict import CIMultiDict

from .core import Core
from .decision_log import DecisionLog
from .exchange import answer_error, answer_json, gets
from .http_server import Request, answering
from .kvindexd import Kvindexd, State
from .metrics import Metrics
from .settings import SettingsError, bearer
from .tokenizer import Tokens
from .upstream import Failure
from .workers import Peers


class ControlAddress(NamedTuple):
    """Address of the control surface; `port` 0 is a free port.

    `authorization`: the header that a request needs, None for none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    authorization: str | None = None


def control_address(text: str, token_file: str | None) -> ControlAddress:
    """Parse HOST:PORT and read the token. Raises SettingsError."""
    parts = urlsplit(f"//{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != text:
        raise SettingsError(f"--control {text}: HOST:PORT is needed")
    if token_file is not None:
        token = bearer("--control-token-file", token_file)
        return ControlAddress(host, port, token)
    if not _is_loopback(host):
        raise SettingsError(
            f"--control {text}: others than this machine may reach it, so "
            "--control-token-file FILE is needed"
        )
    return ControlAddress(host, port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Control:
    """Answers for all workers, whichever is requested."""

    def __init__(
        self,
        core: Core[bytes],
        tokens: Tokens,
        decisions: DecisionLog,
        exact: Kvindexd | None,
        peers: Peers,
    ) -> None:
        self._core = core
        self._decisions = decisions
        self._exact = exact
        self._peers = peers
        self._metrics = Metrics(core, tokens, exact)

    @asynccontextmanager
    async def answered(
        self, address: ControlAddress, bound: socket.socket | None
    ) -> AsyncIterator[int]:
        """Answer operators and other workers inside the context, which gives the port.

        Raises OSError.
        """
        everything = {
            "/health": self._get_health,
            "/metrics": self._get_metrics,
            "/breakdown": self._get_breakdown,
            "/decisions": self._get_decisions,
        }
        own = {
            "/counts": self._get_own_counts,
            "/decisions": self._get_own_decisions,
        }
        at = address.host, address.port, bound
        answer = gets(everything, address.authorization)
        async with (
            self._peers.answered(gets(own, self._peers.authorization)),
            answering(answer, *at) as port,
        ):
            yield port

    async def _states(self) -> dict[str, State]:
        return {} if self._exact is None else await self._exact.states()

    async def _get_health(self, request: Request) -> None:
        """Answer 200 while an instance is healthy, else 503."""
        ejected = self._core.health.ejected
        healthy = [name for name in self._core.instances if name not in ejected]
        body = msgspec.json.encode({"healthy": healthy, "ejected": sorted(ejected)})
        answer_json(request, 200 if healthy else 503, body)

    async def _get_metrics(self, request: Request) -> None:
        others = await self._peers.counts()
        text = self._metrics.prometheus(await self._states(), others)
        kind = CIMultiDict({"Content-Type": "text/plain; version=0.0.4"})
        request.whole(200, kind, text)

    async def _get_breakdown(self, request: Request) -> None:
        others = await self._peers.counts()
        breakdown = self._metrics.breakdown(await self._states(), others)
        answer_json(request, 200, msgspec.json.encode(breakdown))

    async def _get_decisions(self, request: Request) -> None:
        """Answer with the last `n` decisions, one a line as in the log, newest last."""
        text = parse_qs(request.query).get("n", ["100"])[0]
        if not text.isdecimal():
            message = f"n={text!r} is no number of decisions"
            answer_error(request, Failure(400, None, message))
            return
        lines = list(self._decisions.recent)
        if others := await self._peers.decisions():
            lines = sorted([*lines, *others], key=_at_ns)
        _answer_lines(request, lines[max(0, len(lines) - int(text)) :])

    async def _get_own_counts(self, request: Request) -> None:
        answer_json(request, 200, msgspec.json.encode(self._metrics.counts()))

    async def _get_own_decisions(self, request: Request) -> None:
        _answer_lines(request, self._decisions.recent)


class _Decision(msgspec.Struct):
    at_ns: int


def _at_ns(line: bytes) -> int:
    return msgspec.json.decode(line, type=_Decision).at_ns


def _answer_lines(request: Request, lines: Iterable[bytes]) -> None:
    kind = CIMultiDict({"Content-Type": "application/jsonl"})
    request.whole(200, kind, b"\n".join(lines))
