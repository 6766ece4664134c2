# SPDX-License-Identifier: Apache-2.0
"""The proxy put together from its parts, from start to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from multidict import CIMultiDict

from lab.records.decisions import DecisionsHeader
from lab.records.instances import Instance

from .apis import APIS, MESSAGES
from .client import HttpClient, answer_error, answer_json, read
from .core import Core
from .decision_log import DecisionLog
from .handler import Handler
from .http.client import NoConnection, Pool
from .http.request import Request
from .http.server import Server
from .kvindexd import Kvindexd, State
from .metrics import Metrics
from .peers import Peers
from .sessions import Sessions
from .settings import Settings, resolved
from .shared import Seat
from .tokenizer import Tokenizer
from .tokens import Tokens
from .upstream import Failure, Upstream, open_pool, probe, sent_on

log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    host: str,
    port: int,
    bound: socket.socket | None = None,
    seat: Seat | None = None,
) -> AsyncIterator[int]:
    """Serve inside the context, which gives the port.

    One of several workers has a `seat`, and serves where `bound` is.

    Raises SettingsError, PolicyError, TokenizerError, FileExistsError, or OSError if it
    cannot listen.
    """
    settings = resolved(instances, settings)
    header = DecisionsHeader(
        **msgspec.structs.asdict(settings), instances=list(instances)
    )
    async with AsyncExitStack() as stack:
        exact = None
        if settings.kvindexd is not None:
            names = [one.name for one in instances]
            exact = await stack.enter_async_context(Kvindexd(settings.kvindexd, names))
        decisions = stack.enter_context(DecisionLog(log_path, header))
        pool = stack.enter_context(closing(open_pool(settings.silence_timeout_s)))
        proxy = _Proxy(instances, settings, pool, decisions, exact, seat)
        server = Server(
            proxy.answer, settings.max_body_bytes, settings.client_timeout_s
        )
        await stack.enter_async_context(proxy.peers.answered(proxy.answer_peer))
        listening = await server.listen(host, port, bound)
        beside = [*proxy.background(), server.sweep_forever()]
        background = [asyncio.create_task(one) for one in beside]
        for task in background:
            task.add_done_callback(_report_failure)
        try:
            yield listening.sockets[0].getsockname()[1]
        finally:
            listening.close()
            await proxy.handler.stop()
            await server.close()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)


Answering = Callable[[Request], Awaitable[None]]


class _Proxy:
    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        pool: Pool,
        decisions: DecisionLog,
        exact: Kvindexd | None,
        seat: Seat | None = None,
    ) -> None:
        self._instances = instances
        self._pool = pool
        self._decisions = decisions
        self._exact = exact
        self._core = Core(
            instances, settings, Upstream(pool), decisions, exact, seat=seat
        )
        # Two workers may find sessions of their own, and must not name them alike.
        own = "kvtax/" if seat is None else f"kvtax/{seat.number}."
        self._sessions = Sessions(own)
        self.peers = Peers(seat, pool)
        self._tokens = Tokens(_tokenizer(settings))
        self._metrics = Metrics(self._core, self._tokens, exact)
        self._routes: dict[str, dict[str, Answering]] = {
            **{path: {"POST": self._complete} for path in APIS},
            f"{MESSAGES}/count_tokens": {"POST": self._ask_any},
            "/v1/models": {"GET": self._ask_any},
            "/health": {"GET": self._get_health},
            "/metrics": {"GET": self._get_metrics},
            "/breakdown": {"GET": self._get_breakdown},
            "/decisions": {"GET": self._get_decisions},
        }

    @property
    def handler(self) -> Handler:
        return self._core.handler

    async def answer(self, request: Request) -> None:
        """Any request, by its path and method."""
        methods = self._routes.get(request.path)
        if methods is None:
            failure = Failure(404, None, f"{request.path}: not served here")
            answer_error(request, failure)
            return
        answering = methods.get(request.method)
        if answering is None:
            what = f"{request.path}: served for {', '.join(methods)} only"
            answer_error(request, Failure(405, None, what))
            return
        await answering(request)

    def background(self) -> list:
        """What runs beside the requests."""
        return [self._core.health.poll_forever(probe), self._decisions.flush_forever()]

    async def _states(self) -> dict[str, State]:
        return {} if self._exact is None else await self._exact.states()

    async def answer_peer(self, request: Request) -> None:
        """What another worker asks: this one's part of an answer."""
        if request.path == "/counts":
            body = msgspec.json.encode(self._metrics.counts())
            answer_json(request, 200, body)
        else:
            _answer_lines(request, self._decisions.recent)

    async def _complete(self, request: Request) -> None:
        """POST to one of the APIs."""
        client = HttpClient(request, self._sessions, self._tokens)
        await self.handler.handle(client)

    async def _ask_any(self, request: Request) -> None:
        """What each instance would answer alike: the least busy healthy one is asked.

        If none is healthy, one of those that are not.
        """
        ejected, loads = self._core.health.ejected, self._core.loads
        healthy = [one for one in self._instances if one.name not in ejected]
        one = min(healthy or self._instances, key=lambda one: loads[one.name].requests)
        headers = sent_on(request.headers)
        try:
            answer = await self._pool.request(
                request.method, one.url, request.path, headers, read(request)
            )
            answer_json(request, answer.status, await answer.read())
        except Failure as failure:
            answer_error(request, failure)
        except OSError as error:
            what = (
                f"no connection to {one.name}"
                if isinstance(error, NoConnection)
                else one.name
            )
            answer_error(request, Failure(502, one.name, f"{what}: {error}"))

    async def _get_health(self, request: Request) -> None:
        """200 while an instance is healthy, else 503, although requests are tried."""
        ejected = self._core.health.ejected
        healthy = [n for n in self._core.place if n not in ejected]
        body = msgspec.json.encode({"healthy": healthy, "ejected": sorted(ejected)})
        answer_json(request, 200 if healthy else 503, body)

    async def _get_metrics(self, request: Request) -> None:
        others = await self.peers.counts()
        text = self._metrics.prometheus(await self._states(), others)
        kind = CIMultiDict({"Content-Type": "text/plain; version=0.0.4"})
        request.whole(200, kind, text)

    async def _get_breakdown(self, request: Request) -> None:
        others = await self.peers.counts()
        breakdown = self._metrics.breakdown(await self._states(), others)
        answer_json(request, 200, msgspec.json.encode(breakdown))

    async def _get_decisions(self, request: Request) -> None:
        """The last `n` decisions, one a line as in the log, newest last."""
        text = parse_qs(request.query).get("n", ["100"])[0]
        if not text.isdecimal():
            message = f"n={text!r} is no number of decisions"
            answer_error(request, Failure(400, None, message))
            return
        lines = list(self._decisions.recent)
        if others := await self.peers.decisions():
            lines = sorted([*lines, *others], key=_at_ns)
        _answer_lines(request, lines[max(0, len(lines) - int(text)) :])


def _tokenizer(settings: Settings) -> Tokenizer | None:
    return None if settings.tokenizer is None else Tokenizer(settings.tokenizer)


class _Decision(msgspec.Struct):
    at_ns: int


def _at_ns(line: bytes) -> int:
    return msgspec.json.decode(line, type=_Decision).at_ns


def _answer_lines(request: Request, lines: Iterable[bytes]) -> None:
    kind = CIMultiDict({"Content-Type": "application/jsonl"})
    request.whole(200, kind, b"\n".join(lines))


def _report_failure(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
