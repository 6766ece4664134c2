# SPDX-License-Identifier: Apache-2.0
"""The proxy put together from its parts, from start to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from fleet.policies import parameters_of
from lab.records.decisions import DecisionsHeader
from lab.records.instances import Instance

from .decision_log import DecisionLog
from .exact import Exact
from .exchange import CHAT, COMPLETIONS
from .handler import Handler
from .health import Health
from .kv_events import Subscriber
from .loads import FleetLoad
from .metrics import Metrics
from .mirror import Mirror
from .offload import Offloader
from .relay import error_response
from .router import Router
from .settings import Settings, check
from .upstream import Failure, open_session, sent_on

JSON = "application/json"
log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(
    instances: Sequence[Instance],
    settings: Settings,
    log_path: Path | None,
    host: str,
    port: int,
) -> AsyncIterator[int]:
    """Serve inside the context, which gives the port.

    Raises SettingsError, PolicyError, FileExistsError, or OSError if it cannot listen.
    """
    check(instances, settings)
    parameters = parameters_of(settings.policy, settings.parameters)
    settings = msgspec.structs.replace(
        settings, parameters=msgspec.structs.asdict(parameters)
    )
    header = DecisionsHeader(
        **msgspec.structs.asdict(settings), instances=list(instances)
    )
    session = open_session(settings.silence_timeout_s)
    with DecisionLog(log_path, header) as decisions:
        async with session:
            proxy = _Proxy(instances, settings, parameters, session, decisions)
            runner = web.AppRunner(
                proxy.app(),
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=1,
            )
            await runner.setup()
            background = [asyncio.create_task(one) for one in proxy.background()]
            for task in background:
                task.add_done_callback(_report_failure)
            try:
                site = web.TCPSite(runner, host, port, backlog=4096)
                await site.start()
                yield runner.addresses[0][1]
            finally:
                await proxy.handler.stop()
                await runner.cleanup()
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)


class _Proxy:
    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        parameters: msgspec.Struct,
        session: aiohttp.ClientSession,
        decisions: DecisionLog,
    ) -> None:
        count = len(instances)
        self._instances = instances
        self._place = {one.name: place for place, one in enumerate(instances)}
        self._settings = settings
        self._session = session
        self._decisions = decisions
        self._loads = FleetLoad(self._place)
        self._health = Health(instances, self._on_health)
        self._mirror = Mirror(count, settings.mirror_tokens)
        self._exact = Exact(count) if settings.cache == "exact" else None
        self._subscribers = {} if self._exact is None else self._subscribe(self._exact)
        router = Router(
            instances,
            settings.policy,
            parameters,
            self._mirror,
            self._exact,
            self._loads,
            decisions,
        )
        offloader = Offloader(
            session,
            self._loads,
            self._health,
            settings.prefill_timeout_s,
            settings.handover_timeout_s,
        )
        self.handler = Handler(
            session,
            {one.name: one for one in instances},
            router,
            self._loads,
            self._health,
            offloader,
            decisions,
            settings.client_timeout_s,
        )
        self._metrics = Metrics(
            instances,
            self._loads,
            self._health,
            self._mirror,
            self._exact,
            self._subscribers,
            router,
            self.handler,
        )

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes)
        for path in (COMPLETIONS, CHAT):
            app.router.add_post(path, self.handler.handle)
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/breakdown", self._get_breakdown)
        app.router.add_get("/decisions", self._get_decisions)
        return app

    def background(self) -> list:
        """What runs beside the requests."""
        events = [one.run() for one in self._subscribers.values()]
        return [self._health.poll_forever(), self._decisions.flush_forever(), *events]

    def _subscribe(self, exact: Exact) -> dict[str, Subscriber]:
        return {
            one.name: Subscriber(
                one.name,
                one.kv_events,
                one.kv_events_replay,
                partial(exact.apply, place),
                partial(exact.clear, place),
            )
            for place, one in enumerate(self._instances)
        }

    def _on_health(self, name: str, healthy: bool) -> None:
        """An instance that was away may have been restarted, with an empty cache."""
        if not healthy:
            self._mirror.clear(self._place[name])
        elif name in self._subscribers:
            self._subscribers[name].resync()

    async def _get_models(self, request: web.Request) -> web.Response:
        """The first healthy instance's answer, the first one's if none is."""
        ejected = self._health.ejected
        healthy = [one for one in self._instances if one.name not in ejected]
        one = (healthy or self._instances)[0]
        headers = sent_on(request.headers)
        try:
            async with self._session.get(
                one.url + request.path, headers=headers
            ) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return error_response(Failure(502, one.name, f"{one.name}: {error}"))
        return web.Response(status=answer.status, body=body, content_type=JSON)

    async def _get_health(self, _: web.Request) -> web.Response:
        """200 while an instance is healthy, else 503, although requests are tried."""
        healthy = [n for n in self._place if n not in self._health.ejected]
        body = msgspec.json.encode(
            {"healthy": healthy, "ejected": sorted(self._health.ejected)}
        )
        status = 200 if healthy else 503
        return web.Response(status=status, body=body, content_type=JSON)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.prometheus(), content_type="text/plain")

    async def _get_breakdown(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._metrics.breakdown())
        return web.Response(body=body, content_type=JSON)

    async def _get_decisions(self, request: web.Request) -> web.Response:
        """The last `n` decisions, one a line as in the log, newest last."""
        text = request.query.get("n", "100")
        if not text.isdecimal():
            message = f"n={text!r} is no number of decisions"
            return error_response(Failure(400, None, message))
        lines = list(self._decisions.recent)
        body = b"\n".join(lines[max(0, len(lines) - int(text)) :])
        return web.Response(body=body, content_type="application/jsonl")


def _report_failure(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
