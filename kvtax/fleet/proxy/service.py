# SPDX-License-Identifier: Apache-2.0
"""The running proxy: its HTTP endpoints and background tasks, from start to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
import uvloop
from multidict import CIMultiDict

from kvtax.load import allow_open_files
from kvtax.records.decisions import DecisionsHeader
from kvtax.records.instances import Instance

from .apis import APIS, MESSAGES
from .core import Core
from .decision_log import DecisionLog
from .exchange import HttpClient, answer_error, answer_json, read
from .http_client import NoConnection, Pool
from .http_server import Request, Server
from .kvindexd import Kvindexd, State
from .loads import Seat, Shared
from .metrics import Metrics
from .session_affinity import Sessions
from .settings import Settings, SettingsError, resolved
from .tokenizer import Tokenizer, Tokens
from .upstream import Failure, HttpUpstream, forwarded, open_pool, probe
from .workers import STOP_S, Peers, keep, listening

log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """Address of the proxy; `port` 0 is a free port.

    A worker of several has a `seat`, and listens by the socket `bound`.
    """

    host: str
    port: int
    bound: socket.socket | None = None
    seat: Seat | None = None


def serve(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
) -> int:
    """Serve until SIGINT or SIGTERM; return 128 + the signal's number.

    SIGTERM lets the requests under way end first; SIGINT and a second signal do not.
    Prints the URL once it serves. Raises what `serving` raises, and WorkerError.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    allow_open_files()  # two sockets per request
    # transformers would load PyTorch, 700 MB, and tokenizers need nothing of it.
    os.environ["USE_TORCH"] = "0"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # A request leaves the collector little to find, and a collection walks everything.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)

    def announce(port: int) -> None:
        print(f"http://{endpoint.host}:{port}", flush=True)

    if settings.workers == 1:
        return _run(_serve(instances, settings, log_path, endpoint, announce))
    settings = resolved(instances, settings)
    shared = Shared(settings.workers, [instance.name for instance in instances])
    sockets = listening(endpoint.host, endpoint.port, settings.workers)
    port = sockets[0].getsockname()[1]

    def serve_as(seat: Seat, serves: Callable[[], None]) -> None:
        for place, other in enumerate(sockets):
            if place != seat.place:
                other.close()
        own = Endpoint(endpoint.host, port, sockets[seat.place], seat)
        own_log = log_path and log_path.with_stem(f"{log_path.stem}.{seat.number}")
        _run(_serve(instances, settings, own_log, own, lambda _: serves()))

    stop_s = STOP_S + settings.drain_timeout_s
    number = keep(shared, serve_as, lambda: announce(port), sockets, stop_s)
    return 128 + number


def _run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _serve(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
    announce: Callable[[int], None],
) -> int:
    """Serve until SIGINT or SIGTERM; call `announce` with the port once it serves."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    hurried = asyncio.Event()

    def stop(number: int) -> None:
        if stopped.done() or number == signal.SIGINT:
            hurried.set()
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    async with serving(instances, settings, log_path, endpoint, hurried) as port:
        announce(port)
        return 128 + await stopped


@asynccontextmanager
async def serving(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
    hurried: asyncio.Event | None = None,
) -> AsyncIterator[int]:
    """Serve inside the context, which gives the port.

    On leaving it, the requests under way have `drain_timeout_s` to end, until `hurried`
    is set; none without it. Raises SettingsError, PolicyError, TokenizerError, or
    OSError if it cannot listen.
    """
    settings = resolved(instances, settings)
    header = DecisionsHeader(
        **msgspec.structs.asdict(settings), instances=list(instances)
    )
    async with AsyncExitStack() as stack:
        exact = None
        if settings.kvindexd is not None:
            names = [instance.name for instance in instances]
            kvindexd = Kvindexd(
                settings.kvindexd,
                names,
                settings.kvindexd_token_file,
                settings.kvindexd_ca_file,
            )
            exact = await stack.enter_async_context(kvindexd)
        decisions = stack.enter_context(_open_log(log_path, header))
        pool = stack.enter_context(closing(open_pool(settings.silence_timeout_s)))
        proxy = _Proxy(instances, settings, pool, decisions, exact, endpoint.seat)
        server = Server(
            proxy.answer,
            settings.max_body_bytes,
            settings.max_held_bytes,
            settings.client_timeout_s,
        )
        await stack.enter_async_context(proxy.peers.answered(proxy.answer_peer))
        listening = await server.listen(endpoint.host, endpoint.port, endpoint.bound)
        work = [*proxy.background(), server.sweep_forever()]
        background = [asyncio.create_task(task) for task in work]
        for task in background:
            task.add_done_callback(_report_failure)
        try:
            yield listening.sockets[0].getsockname()[1]
        finally:
            listening.close()
            if hurried is not None:
                await server.drain(settings.drain_timeout_s, hurried)
            await proxy.core.stop()
            await server.close()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)


def _open_log(path: Path | None, header: DecisionsHeader) -> DecisionLog:
    try:
        return DecisionLog(path, header)
    except FileExistsError:
        raise SettingsError(
            f"--log {path}: the file exists; name another or remove it"
        ) from None


Answering = Callable[[Request], Awaitable[None]]


class _Proxy:
    """The endpoints of one worker, or of a proxy of one process."""

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
        self.core = Core(
            instances, settings, HttpUpstream(pool), decisions, exact, seat=seat
        )
        # Two workers may find sessions of their own, and must not name them alike.
        own = "kvtax/" if seat is None else f"kvtax/{seat.number}."
        self._sessions = Sessions(own)
        self.peers = Peers(seat, pool)
        self._tokens = Tokens(_tokenizer(settings))
        self._metrics = Metrics(self.core, self._tokens, exact)
        self._routes: dict[str, dict[str, Answering]] = {
            **{path: {"POST": self._complete} for path in APIS},
            f"{MESSAGES}/count_tokens": {"POST": self._answer_by_any},
            "/v1/models": {"GET": self._answer_by_any},
            "/health": {"GET": self._get_health},
            "/metrics": {"GET": self._get_metrics},
            "/breakdown": {"GET": self._get_breakdown},
            "/decisions": {"GET": self._get_decisions},
        }

    async def answer(self, request: Request) -> None:
        """Answer any request, by its path and method."""
        if (fault := request.fault()) is not None:
            request.keep_alive = False
            answer_error(request, Failure(fault[0], None, fault[1]))
            return
        methods = self._routes.get(request.path)
        if methods is None:
            failure = Failure(404, None, f"{request.path}: not served here")
            answer_error(request, failure)
            return
        answering = methods.get(request.method)
        if answering is None:
            message = f"{request.path}: served for {', '.join(methods)} only"
            answer_error(request, Failure(405, None, message))
            return
        await answering(request)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work beside the requests."""
        return [self.core.health.poll_forever(probe), self._decisions.flush_forever()]

    async def _states(self) -> dict[str, State]:
        return {} if self._exact is None else await self._exact.states()

    async def answer_peer(self, request: Request) -> None:
        """Answer another worker with this worker's part."""
        if request.path == "/counts":
            body = msgspec.json.encode(self._metrics.counts())
            answer_json(request, 200, body)
        else:
            _answer_lines(request, self._decisions.recent)

    async def _complete(self, request: Request) -> None:
        """Answer a POST to one of the APIs."""
        client = HttpClient(request, self._sessions, self._tokens)
        await self.core.handle(client)

    async def _answer_by_any(self, request: Request) -> None:
        """Pass on a request that all instances answer alike, to the least busy one.

        Healthy instances are preferred.
        """
        ejected, loads = self.core.health.ejected, self.core.loads
        healthy = [
            instance for instance in self._instances if instance.name not in ejected
        ]
        instance = min(
            healthy or self._instances,
            key=lambda instance: loads[instance.name].requests,
        )
        headers = forwarded(request.headers)
        try:
            answer = await self._pool.request(
                request.method, instance.url, request.path, headers, read(request)
            )
            answer_json(request, answer.status, await answer.read())
        except Failure as failure:
            answer_error(request, failure)
        except OSError as error:
            prefix = "no connection to " if isinstance(error, NoConnection) else ""
            message = f"{prefix}{instance.name}: {error}"
            answer_error(request, Failure(502, instance.name, message))

    async def _get_health(self, request: Request) -> None:
        """Answer 200 while an instance is healthy, else 503."""
        ejected = self.core.health.ejected
        healthy = [name for name in self.core.instances if name not in ejected]
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
        """Answer with the last `n` decisions, one a line as in the log, newest last."""
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


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
