# SPDX-License-Identifier: Apache-2.0
"""The running proxy: its HTTP endpoints and background tasks, from start to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import uvloop
from aiohttp import web
from kvtax.load import allow_open_files
from kvtax.proc.ports import LOOPBACK
from kvtax.signals import heeded

from kvtax_fleet.proxy.apis import APIS
from kvtax_fleet.proxy.control import Control
from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import Failure, Lost
from kvtax_fleet.proxy.http_server import (
    HttpClient,
    answering,
    check_head,
    error_response,
    json_response,
)
from kvtax_fleet.proxy.settings import Settings, SettingsError, header_of, resolved
from kvtax_fleet.proxy.upstream import HttpUpstream, forwarded
from kvtax_fleet.records.decisions import DecisionsHeader
from kvtax_fleet.records.instances import Instance

# Threads of libuv, which looks names up: more than names that may hang.
LOOK_UP_THREADS = "64"
log = logging.getLogger(__name__)


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
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
) -> int:
    """Serve the instances; return 128 + a signal's number.

    The requests under way end with an error. Prints its URL and that of its
    control surface once it serves. Raises what `serving` raises.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    allow_open_files()  # two sockets per request
    os.environ.setdefault("UV_THREADPOOL_SIZE", LOOK_UP_THREADS)
    # A request leaves the collector little to find, and a collection walks everything.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(instances, settings, log_path, endpoint))


async def _serve(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in heeded((signal.SIGINT, signal.SIGTERM)):
        loop.add_signal_handler(number, stop, number)
    async with serving(instances, settings, log_path, endpoint) as proxy:
        print(_url(endpoint.host, proxy.ports.clients), flush=True)
        control = _url(LOOPBACK, proxy.ports.control)
        print(f"control: {control}", flush=True)
        return 128 + await stopped


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    endpoint: Endpoint,
) -> AsyncIterator[Proxy]:
    """Serve inside the context; leaving it ends the requests under way.

    Raises SettingsError, PolicyError, or OSError if it cannot listen.
    """
    settings = resolved(instances, settings)
    header = header_of(settings, instances)
    async with AsyncExitStack() as stack:
        decisions = stack.enter_context(_open_log(log_path, header))
        upstream = HttpUpstream(settings.silence_timeout_s)
        await stack.enter_async_context(upstream)
        proxy = Proxy(instances, settings, upstream, decisions)
        control = Control(proxy.core, decisions)
        at_control = answering(control.answer, LOOPBACK, endpoint.control_port)
        controlling = await stack.enter_async_context(at_control)
        at = answering(proxy.answer, endpoint.host, endpoint.port)
        runner = await stack.enter_async_context(at)
        proxy.ports = Ports(
            runner.addresses[0][1],
            controlling.addresses[0][1],
        )
        background = [
            asyncio.create_task(proxy.core.health.poll_forever(upstream.probe)),
            asyncio.create_task(proxy.core.read_gauges_forever()),
            asyncio.create_task(decisions.flush_forever()),
        ]
        for task in background:
            task.add_done_callback(_report_failure)
        try:
            yield proxy
        finally:
            for site in list(runner.sites):
                await site.stop()
            assert runner.server is not None
            runner.server.pre_shutdown()
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
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self.core = Core(instances, settings, upstream, decisions)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        try:
            return await self._answer(request)
        except Failure as failure:
            return error_response(failure)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer by the decoded path; nothing else of a client's path is sent on.

        Raises Failure.
        """
        check_head(request)
        path, is_get = request.path, request.method in ("GET", "HEAD")
        if path in APIS and request.method == "POST":
            client = HttpClient(request, path, self._settings.max_body_bytes)
            await self.core.handle(client)
            return client.response or web.Response(status=503)  # it is gone
        if path == "/health" and is_get:
            healthy = self.core.health.out < self.core.instances.keys()
            return web.Response(status=200 if healthy else 503)
        if path == "/v1/models" and is_get:
            return await self._models(request)
        if path in (*APIS, "/health", "/v1/models"):
            raise Failure(405, None, f"{request.method} is not served at {path}")
        served = ", ".join(APIS)
        raise Failure(404, None, f"only {served}, /v1/models and /health are served")

    async def _models(self, request: web.BaseRequest) -> web.Response:
        """Answer with the models of the first healthy instance. Raises Failure."""
        headers = forwarded(request.headers)
        for name, instance in self.core.instances.items():
            if name in self.core.health.out:
                continue
            try:
                return json_response(*await self._upstream.models(instance, headers))
            except Lost as failure:
                log.warning("%s", failure)
        raise Failure(503, None, "no healthy instance")


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
