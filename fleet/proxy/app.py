# SPDX-License-Identifier: Apache-2.0
"""The proxy put together from its parts, from start to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from lab.records.decisions import DecisionsHeader
from lab.records.instances import Instance

from .apis import APIS, MESSAGES
from .client import HttpClient, error_response, read
from .core import Core
from .decision_log import DecisionLog
from .handler import Handler
from .kvindexd import Kvindexd, State
from .metrics import Metrics
from .sessions import Sessions
from .settings import Settings, resolved
from .tokenizer import Tokenizer
from .tokens import Tokens
from .upstream import Failure, Upstream, open_session, probing, sent_on

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
        session = await stack.enter_async_context(
            open_session(settings.silence_timeout_s)
        )
        proxy = _Proxy(instances, settings, session, decisions, exact)
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
        session: aiohttp.ClientSession,
        decisions: DecisionLog,
        exact: Kvindexd | None,
    ) -> None:
        self._instances = instances
        self._settings = settings
        self._session = session
        self._decisions = decisions
        self._exact = exact
        self._core = Core(instances, settings, Upstream(session), decisions, exact)
        self._sessions = Sessions()
        self._tokens = Tokens(_tokenizer(settings))
        self._metrics = Metrics(self._core, self._tokens, exact)

    @property
    def handler(self) -> Handler:
        return self._core.handler

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes)
        for path in APIS:
            app.router.add_post(path, self._complete)
        app.router.add_post(f"{MESSAGES}/count_tokens", self._ask_any)
        app.router.add_get("/v1/models", self._ask_any)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/breakdown", self._get_breakdown)
        app.router.add_get("/decisions", self._get_decisions)
        return app

    def background(self) -> list:
        """What runs beside the requests."""
        return [self._poll_health(), self._decisions.flush_forever()]

    async def _poll_health(self) -> None:
        async with probing() as probe:
            await self._core.health.poll_forever(probe)

    async def _states(self) -> dict[str, State]:
        return {} if self._exact is None else await self._exact.states()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """POST to one of the APIs."""
        timeout_s = self._settings.client_timeout_s
        client = HttpClient(request, timeout_s, self._sessions, self._tokens)
        await self.handler.handle(client)
        return client.response

    async def _ask_any(self, request: web.Request) -> web.Response:
        """What each instance would answer alike: the least busy healthy one is asked.

        If none is healthy, one of those that are not.
        """
        ejected, loads = self._core.health.ejected, self._core.loads
        healthy = [one for one in self._instances if one.name not in ejected]
        one = min(healthy or self._instances, key=lambda one: loads[one.name].requests)
        try:
            async with self._session.request(
                request.method,
                one.url + request.path,
                headers=sent_on(request.headers),
                data=await read(request),
            ) as answer:
                body = await answer.read()
        except Failure as failure:
            return error_response(failure, request.path)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = Failure(502, one.name, f"{one.name}: {error}")
            return error_response(failure, request.path)
        return web.Response(status=answer.status, body=body, content_type=JSON)

    async def _get_health(self, _: web.Request) -> web.Response:
        """200 while an instance is healthy, else 503, although requests are tried."""
        ejected = self._core.health.ejected
        healthy = [n for n in self._core.place if n not in ejected]
        body = msgspec.json.encode({"healthy": healthy, "ejected": sorted(ejected)})
        status = 200 if healthy else 503
        return web.Response(status=status, body=body, content_type=JSON)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        body = self._metrics.prometheus(await self._states())
        return web.Response(body=body, content_type="text/plain")

    async def _get_breakdown(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._metrics.breakdown(await self._states()))
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


def _tokenizer(settings: Settings) -> Tokenizer | None:
    return None if settings.tokenizer is None else Tokenizer(settings.tokenizer)


def _report_failure(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a background task has failed", exc_info=error)
