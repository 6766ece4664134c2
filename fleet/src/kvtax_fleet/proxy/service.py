# SPDX-License-Identifier: Apache-2.0
"""The running proxy: its HTTP endpoints and background tasks, from start to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import msgspec
import uvloop
from aiohttp import web
from kvtax.load import allow_open_files
from kvtax.proc.ports import LOOPBACK

from kvtax_fleet.instances import InstancesError
from kvtax_fleet.policies import PolicyError
from kvtax_fleet.proxy.apis import APIS, UNREADABLE
from kvtax_fleet.proxy.body import decode_fields, model_of
from kvtax_fleet.proxy.control import Control
from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import Failure, Unreachable
from kvtax_fleet.proxy.health import Served
from kvtax_fleet.proxy.http_server import (
    Bodies,
    Generating,
    HttpClient,
    answering,
    error_response,
    json_response,
)
from kvtax_fleet.proxy.kvindexd import Kvindexd
from kvtax_fleet.proxy.session_affinity import Sessions
from kvtax_fleet.proxy.settings import (
    Settings,
    SettingsError,
    check,
    header_of,
    resolved,
)
from kvtax_fleet.proxy.upstream import HttpAnswer, HttpUpstream
from kvtax_fleet.records.decisions import DecisionsHeader
from kvtax_fleet.records.instances import Instance

# Threads of libuv, which looks names up: more than names that may hang.
LOOK_UP_THREADS = "64"
log = logging.getLogger(__name__)
ReadInstances = Callable[[], Sequence[Instance]]


class Endpoint(NamedTuple):
    """Address of the proxy, and port of its control surface; 0 is a free port."""

    host: str
    port: int
    control_port: int = 0


class Ports(NamedTuple):
    """Ports at which a proxy serves."""

    clients: int
    control: int


def serve(
    read: ReadInstances, settings: Settings, log_path: Path | None, endpoint: Endpoint
) -> int:
    """Serve the instances that `read` returns; return 128 + a signal's number.

    SIGTERM lets the requests under way end first; SIGINT and a second signal do not.
    SIGHUP reads the instances again. Prints its URL and that of its control surface
    once it serves. Raises what `read` and `serving` raise.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    allow_open_files()  # two sockets per request
    os.environ.setdefault("UV_THREADPOOL_SIZE", LOOK_UP_THREADS)
    # A request leaves the collector little to find, and a collection walks everything.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(read, settings, log_path, endpoint))


async def _serve(
    read: ReadInstances, settings: Settings, log_path: Path | None, endpoint: Endpoint
) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    hurried, reread = asyncio.Event(), asyncio.Event()

    def stop(number: int) -> None:
        if stopped.done() or number == signal.SIGINT:
            hurried.set()
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reread.set)
    async with serving(read(), settings, log_path, endpoint, hurried) as proxy:
        print(_url(endpoint.host, proxy.ports.clients), flush=True)
        control = _url(LOOPBACK, proxy.ports.control)
        print(f"control: {control}", flush=True)
        rereading = asyncio.create_task(_reread_forever(proxy, read, reread))
        rereading.add_done_callback(_report_failure)
        try:
            return 128 + await stopped
        finally:
            rereading.cancel()


async def _reread_forever(
    proxy: Proxy, read: ReadInstances, reread: asyncio.Event
) -> None:
    """Read the instances at each event; go on with the former ones on an error."""
    while True:
        await reread.wait()
        reread.clear()
        try:
            await proxy.follow(read())
        except (InstancesError, SettingsError, PolicyError) as error:
            log.error("SIGHUP: the instances stay as they are: %s", error)
        else:
            log.warning("SIGHUP: instances are now %s", ", ".join(proxy.core.instances))


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
    hurried: asyncio.Event | None = None,
) -> AsyncIterator[Proxy]:
    """Serve inside the context.

    On leaving it, the requests under way have `drain_timeout_s` to end, until `hurried`
    is set; none without it. Raises SettingsError, PolicyError, or
    OSError if it cannot listen.
    """
    settings = resolved(instances, settings)
    header = header_of(settings, instances)
    async with AsyncExitStack() as stack:
        exact = None
        if settings.kvindexd is not None:
            names = [instance.name for instance in instances]
            kvindexd = Kvindexd(settings.kvindexd, names)
            exact = await stack.enter_async_context(kvindexd)
        decisions = stack.enter_context(_open_log(log_path, header))
        upstream = HttpUpstream(instances, settings.silence_timeout_s)
        await stack.enter_async_context(upstream)
        proxy = Proxy(instances, settings, upstream, decisions, exact)
        control = Control(proxy.core, decisions, exact)
        at_control = answering(control.answer, LOOPBACK, endpoint.control_port)
        controlling = await stack.enter_async_context(at_control)
        await proxy.poll_once()
        at = answering(proxy.answer, endpoint.host, endpoint.port)
        runner = await stack.enter_async_context(at)
        proxy.ports = Ports(
            runner.addresses[0][1],  # type: ignore[index]
            controlling.addresses[0][1],  # type: ignore[index]
        )
        background = [asyncio.create_task(task) for task in proxy.background()]
        for task in background:
            task.add_done_callback(_report_failure)
        try:
            yield proxy
        finally:
            proxy.draining = True
            for site in list(runner.sites):
                await site.stop()
            assert runner.server is not None
            runner.server.pre_shutdown()
            if hurried is not None:
                await proxy.drain(settings.drain_timeout_s, hurried)
            await proxy.core.stop()
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


class Proxy:
    """Endpoints for clients; `ports` are there once it serves."""

    ports: Ports

    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        upstream: HttpUpstream,
        decisions: DecisionLog,
        exact: Kvindexd | None,
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._decisions = decisions
        self._exact = exact
        self._served = Served(instances, upstream.list_models, monotonic_ns)
        self.core = Core(
            instances, settings, upstream, decisions, exact, served=self._served
        )
        self._sessions = Sessions()
        self._bodies = Bodies(
            settings.max_body_bytes, settings.max_held_bytes, settings.client_timeout_s
        )
        self._under_way = 0
        self.draining = False

    async def follow(self, instances: Sequence[Instance]) -> None:
        """Replace the instances; sessions stay at those that are left.

        Raises SettingsError and PolicyError, and then changes nothing.
        """
        check(instances, self._settings)
        if self._exact is not None:
            await self._exact.follow([instance.name for instance in instances])
        self._upstream.instances = instances
        self.core.follow(instances)
        await self.poll_once()

    async def poll_once(self) -> None:
        """Poll all instances, and read what they serve."""
        health, instances = self.core.health, list(self.core.instances.values())
        await asyncio.gather(*(health.poll(self._probe, each) for each in instances))

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work beside the requests."""
        return [
            self.core.health.poll_forever(self._probe),
            self.core.read_gauges_forever(),
            self._served.read_forever(),
            self._decisions.flush_forever(),
        ]

    async def _probe(self, instance: Instance) -> None:
        """Poll an instance; one that is new or back says first what it serves."""
        await self._upstream.probe(instance)
        is_out = instance.name in self.core.health.ejected
        if is_out or not self._served.is_read(instance):
            await self._served.read_of(instance)

    async def drain(self, limit_s: float, hurried: asyncio.Event) -> None:
        """Wait for the requests under way, until `hurried` is set or for `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._under_way and not hurried.is_set():
                    await asyncio.sleep(0.02)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request, by its path and method; instances know other paths."""
        self._under_way += 1
        try:
            with self._bodies.held(request):
                response = await self._answer(request)
            if self.draining:
                response.force_close()
            return response
        finally:
            self._under_way -= 1

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.draining:
            failure = Failure(503, None, "the proxy is being stopped")
            return error_response(failure, request.path)
        timeout_s, path = self._settings.client_timeout_s, request.rel_url.raw_path
        is_get = request.method in ("GET", "HEAD")
        if request.method == "POST" and path in APIS:
            client = Generating(request, timeout_s, self._bodies, self._sessions)
            await self.core.handle(client)
            return client.response or web.Response(status=503)  # it is gone
        if is_get and path == "/health":
            healthy = self.core.health.ejected < self.core.instances.keys()
            return web.Response(status=200 if healthy else 503)
        if is_get and path == "/v1/models" and not self._served.same:
            models = list(self._served.together().values())
            return json_response(
                200, msgspec.json.encode({"object": "list", "data": models})
            )
        other = HttpClient(request, timeout_s)
        try:
            await self._pass_on(request, other)
        except Failure as failure:
            other.refuse(failure)
        assert other.response is not None
        return other.response

    async def _pass_on(self, request: web.BaseRequest, client: HttpClient) -> None:
        """Let an instance of the model answer: a healthy one, the least busy first.

        Another is tried where one has no connection, or knows no such thing: a
        response, say, is known where it was made. One that fails would be the least
        busy, so another is tried once in its place, too. Raises Failure.
        """
        body = await self._bodies.read(request)
        model = None
        with suppress(*UNREADABLE):  # which an instance answers
            model = model_of(decode_fields(body)) if body else None
        lacking = await self._served.lacking(model)
        health, loads = self.core.health, self.core.loads
        out, failed = health.unavailable(model), list[str]()
        instances = sorted(
            (each for name, each in self.core.instances.items() if name not in lacking),
            key=lambda each: (each.name in out, loads[each.name].requests),
        )
        for left, instance in reversed(list(enumerate(reversed(instances)))):
            name = instance.name
            with loads.flight(name, 0):
                try:
                    answer = await self._open(request, client, instance, body)
                except Failure as failure:
                    health.failed(failure, model, client.name)
                    if left and isinstance(failure, Unreachable):
                        continue
                    if left and not failed and failure.instance is not None:
                        failed.append(name)
                        continue
                    raise
                try:
                    if answer.status == 404 and left:
                        continue
                    well = answer.status < 500
                    if not well:
                        health.answered(name, model, client.name, well=False)
                    if left and not (well or failed):
                        failed.append(name)
                        continue
                    health.judge(failed, model, well)
                    await _copy(answer, client, name)
                    return
                finally:
                    answer.close()

    async def _open(
        self,
        request: web.BaseRequest,
        client: HttpClient,
        instance: Instance,
        body: bytes,
    ) -> HttpAnswer:
        async with self.core.health.until_down(instance.name):
            return await self._upstream.open(
                instance, request.method, request.raw_path, client.headers, body
            )


async def _copy(answer: HttpAnswer, client: HttpClient, name: str) -> None:
    headers = answer.headers
    headers["X-Kvtax-Instance"] = name
    await client.begin(answer.status, headers)
    while chunk := await answer.chunk():
        await client.write(chunk)
    await client.end()


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
