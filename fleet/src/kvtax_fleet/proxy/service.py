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
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import msgspec
import uvloop
from kvtax.load import allow_open_files
from multidict import CIMultiDict

from kvtax_fleet.records.decisions import DecisionsHeader
from kvtax_fleet.records.instances import Instance

from .apis import APIS, MESSAGES, UNREADABLE
from .body import model_of, top_level
from .control import Control, ControlAddress
from .core import Core
from .decision_log import DecisionLog
from .exchange import HttpClient, Routes, answer_error, answer_json, read, routed
from .health import Served
from .http_client import NoConnection, Pool
from .http_server import Request, Server
from .kvindexd import Kvindexd
from .loads import Seat, Shared
from .session_affinity import Sessions
from .settings import Settings, SettingsError, resolved
from .tokenizer import Tokenizer, Tokens
from .upstream import (
    Failure,
    HttpUpstream,
    forwarded,
    list_models,
    open_pool,
    probe,
)
from .workers import STOP_S, Peers, keep, listening

log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """Addresses of the proxy; `port` 0 is a free port.

    A worker of several has a `seat`, and listens by the sockets `bound` and
    `control_bound`.
    """

    host: str
    port: int
    control: ControlAddress = ControlAddress()
    bound: socket.socket | None = None
    control_bound: socket.socket | None = None
    seat: Seat | None = None


class Ports(NamedTuple):
    """Ports at which a proxy serves."""

    clients: int
    control: int


def serve(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
) -> int:
    """Serve until SIGINT or SIGTERM; return 128 + the signal's number.

    SIGTERM lets the requests under way end first; SIGINT and a second signal do not.
    Prints its URL and that of its control surface once it serves. Raises what `serving`
    raises, and WorkerError.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    allow_open_files()  # two sockets per request
    # transformers would load PyTorch, 700 MB, and tokenizers need nothing of it.
    os.environ["USE_TORCH"] = "0"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # A request leaves the collector little to find, and a collection walks everything.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)

    def announce(ports: Ports) -> None:
        print(_url(endpoint.host, ports.clients), flush=True)
        print(f"control: {_url(endpoint.control.host, ports.control)}", flush=True)

    if settings.workers == 1:
        return _run(_serve(instances, settings, log_path, endpoint, announce))
    settings = resolved(instances, settings)
    shared = Shared(settings.workers, [instance.name for instance in instances])
    sockets = listening(endpoint.host, endpoint.port, settings.workers)
    [control] = listening(endpoint.control.host, endpoint.control.port, 1)
    ports = Ports(sockets[0].getsockname()[1], control.getsockname()[1])

    def serve_as(seat: Seat, serves: Callable[[], None]) -> None:
        for place, other in enumerate(sockets):
            if place != seat.place:
                other.close()
        own = endpoint._replace(
            bound=sockets[seat.place], control_bound=control, seat=seat
        )
        own_log = log_path and log_path.with_stem(f"{log_path.stem}.{seat.number}")
        _run(_serve(instances, settings, own_log, own, lambda _: serves()))

    stop_s = STOP_S + settings.drain_timeout_s
    number = keep(shared, serve_as, lambda: announce(ports), sockets, stop_s)
    return 128 + number


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _serve(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
    announce: Callable[[Ports], None],
) -> int:
    """Serve until SIGINT or SIGTERM; call `announce` with the ports once it serves."""
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
    async with serving(instances, settings, log_path, endpoint, hurried) as ports:
        announce(ports)
        return 128 + await stopped


@asynccontextmanager
async def serving(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
    hurried: asyncio.Event | None = None,
) -> AsyncIterator[Ports]:
    """Serve inside the context, which gives the ports.

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
        peers = Peers(endpoint.seat, pool)
        control = Control(proxy.core, proxy.tokens, decisions, exact, peers)
        control_port = await stack.enter_async_context(
            control.answered(endpoint.control, endpoint.control_bound)
        )
        await proxy.served.read()
        listening = await server.listen(endpoint.host, endpoint.port, endpoint.bound)
        work = [*proxy.background(), server.sweep_forever()]
        background = [asyncio.create_task(task) for task in work]
        for task in background:
            task.add_done_callback(_report_failure)
        try:
            yield Ports(listening.sockets[0].getsockname()[1], control_port)
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


class _Proxy:
    """Endpoints for clients, of one worker or of a proxy of one process."""

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
        self.served = Served(instances, list_models, monotonic_ns)
        self.core = Core(
            instances,
            settings,
            HttpUpstream(pool),
            decisions,
            exact,
            seat=seat,
            served=self.served,
        )
        # Two workers may find sessions of their own, and must not name them alike.
        own = "kvtax/" if seat is None else f"kvtax/{seat.number}."
        self._sessions = Sessions(own)
        self.tokens = Tokens(_tokenizer(settings))
        self._routes: Routes = {
            **{path: ("POST", self._complete) for path in APIS},
            f"{MESSAGES}/count_tokens": ("POST", self._count_tokens),
            "/v1/models": ("GET", self._get_models),
            "/health": ("GET", self._get_health),
        }

    async def answer(self, request: Request) -> None:
        """Answer any request, by its path and method."""
        await routed(self._routes, request)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work beside the requests."""
        return [
            self.core.health.poll_forever(probe),
            self.served.read_forever(),
            self._decisions.flush_forever(),
        ]

    async def _complete(self, request: Request) -> None:
        """Answer a POST to one of the APIs."""
        client = HttpClient(request, self._sessions, self.tokens)
        await self.core.handle(client)

    async def _get_models(self, request: Request) -> None:
        """Answer with the models of all instances."""
        if self.served.same:
            await self._answer_by_any(request, None)
            return
        models = {"object": "list", "data": list(self.served.together().values())}
        answer_json(request, 200, msgspec.json.encode(models))

    async def _count_tokens(self, request: Request) -> None:
        model = None
        with suppress(Failure, *UNREADABLE):  # which an instance answers
            model = model_of(top_level(read(request)))
        await self._answer_by_any(request, model)

    async def _answer_by_any(self, request: Request, model: str | None) -> None:
        """Pass on a request that all instances of the model answer alike.

        The least busy one answers; healthy instances are preferred.
        """
        health, loads = self.core.health, self.core.loads
        try:
            lacking = await self.served.lacking(model)
        except Failure as failure:
            answer_error(request, failure)
            return
        serving = [each for each in self._instances if each.name not in lacking]
        healthy = [each for each in serving if each.name not in health.ejected]
        instance = min(
            healthy or serving, key=lambda instance: loads[instance.name].requests
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
        healthy = self.core.health.ejected < self.core.instances.keys()
        request.whole(200 if healthy else 503, CIMultiDict(), b"")


def _tokenizer(settings: Settings) -> Tokenizer | None:
    return None if settings.tokenizer is None else Tokenizer(settings.tokenizer)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
