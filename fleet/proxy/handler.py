# SPDX-License-Identifier: Apache-2.0
"""A completion request from its arrival to its end line, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from itertools import count

import aiohttp
from aiohttp import web

from fleet.instances import Instance
from fleet.policies import NoInstance

from .body import Body, BodyError
from .decision_log import DecisionLog, EndLine
from .health import Health
from .loads import Flight, Loads
from .offload import GivenUp, Offloader
from .relay import STOPPED, error_response, relay
from .router import Route, Router
from .upstream import Answer, Failure, Unreachable, ask, sent_on

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# For slow readers, to whom the news that we stop cannot be brought at once.
STOP_GRACE_S = 1.0
log = logging.getLogger(__name__)


class Handler:
    """`ended` counts requests by (instance, status); `fallbacks` given up offloads."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        instances: dict[str, Instance],
        router: Router,
        loads: Loads,
        health: Health,
        offloader: Offloader,
        decisions: DecisionLog,
    ) -> None:
        self._session = session
        self._instances = instances
        self._router = router
        self._loads = loads
        self._health = health
        self._offloader = offloader
        self._decisions = decisions
        self._numbers = count()
        self._tasks: set[asyncio.Task] = set()
        self.stopping = False
        self.ended: Counter[tuple[str | None, str]] = Counter()
        self.fallbacks: Counter[str | None] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        number = next(self._numbers)
        end = EndLine(
            id=request.headers.get("X-Request-Id") or f"kvtax/{number}",
            number=number,
            session=request.headers.get("X-Session-Id"),
        )
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await self._answered(request, end)
        except Failure as failure:
            return self._refused(end, failure)
        except (asyncio.CancelledError, ConnectionResetError):
            if not self.stopping:
                end.status, end.error = "client_gone", None
                raise
            end.status, end.error = "proxy_stopped", STOPPED
            return error_response(Failure(503, None, STOPPED))
        except Exception as error:
            log.exception("request %s", end.id)
            what = f"the proxy failed: {type(error).__name__}: {error}"
            return self._refused(end, Failure(500, None, what))
        finally:
            self._tasks.discard(task)
            self._decisions.ended(end)
            self.ended[end.instance, end.status] += 1

    async def stop(self) -> None:
        """End what is in flight, each with an error and an end line."""
        self.stopping = True
        for _ in range(2):
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)

    def _refused(self, end: EndLine, failure: Failure) -> web.Response:
        refused = failure.status < 500 or failure.instance is None
        end.status = "refused" if refused else "failed"
        end.error, end.http_status = str(failure), failure.status
        return error_response(failure)

    async def _answered(self, request: web.Request, end: EndLine) -> web.StreamResponse:
        body = await _body_of(request)
        without = set(self._health.ejected)
        for attempt in (0, 1):
            try:
                route = self._router.route(end, body, attempt, without)
            except NoInstance as error:
                raise Failure(503, None, str(error)) from None
            end.instance = route.decision.instance
            try:
                with self._loads.flight(end.instance, route.prompt_tokens) as flight:
                    return await self._exchange(request, body, route, flight, end)
            except Unreachable as error:
                self._health.failed(error.instance, str(error), refused=True)
                if attempt:
                    raise
                without.add(error.instance)
            except Failure as error:
                if error.instance is not None:
                    self._health.failed(error.instance, str(error))
                raise
        raise AssertionError

    async def _exchange(
        self,
        request: web.Request,
        body: Body,
        route: Route,
        flight: Flight,
        end: EndLine,
    ) -> web.StreamResponse:
        answer = await self._asked(request, body, route, flight, end)
        try:
            response = await relay(
                request, answer, flight, end, stopping=lambda: self.stopping
            )
        finally:
            answer.close()
        if end.status == "failed" and answer.status not in range(400, 500):
            self._health.failed(end.instance, end.error)
        elif end.status == "ok":
            self._health.succeeded(end.instance)
        return response

    async def _asked(
        self,
        request: web.Request,
        body: Body,
        route: Route,
        flight: Flight,
        end: EndLine,
    ) -> Answer:
        """The instance's answer, once its first byte is here."""
        decision = route.decision
        d = self._instances[decision.instance]
        headers = sent_on(request.headers)
        if decision.prefill is not None:
            answer = await self._offloaded(request.path, headers, body, route, d, end)
            if answer is not None:
                return answer
        flight.prefills(route.new_tokens[d.name])
        raw = body.raw
        if decision.read_from is not None:
            peer = self._instances[decision.read_from].direct_read
            params = {"direct_read": {"host": peer.host, "port": peer.port}}
            raw = body.with_transfer(params)
        return await ask(self._session, d, request.path, headers, raw)

    async def _offloaded(
        self,
        path: str,
        headers: dict[str, str],
        body: Body,
        route: Route,
        d: Instance,
        end: EndLine,
    ) -> Answer | None:
        """None if D has to prefill itself; `end.fallback` then says why."""
        p = self._instances[route.decision.prefill]
        if not body.single:
            end.fallback = "asks for several answers"
            return None
        try:
            answer = await self._offloader.ask(
                p, d, path, headers, body, route.prompt_tokens, route.new_tokens[p.name]
            )
        except GivenUp as error:
            log.warning("request %s: %s; prefill on %s", end.id, error, d.name)
            self.fallbacks[p.name] += 1
            end.fallback = str(error)
            return None
        end.prefill_instance = p.name
        return answer


async def _body_of(request: web.Request) -> Body:
    try:
        return Body(await request.read(), request.path == CHAT)
    except web.HTTPRequestEntityTooLarge as error:
        raise Failure(413, None, f"the body is too large: {error.text}") from None
    except BodyError as error:
        raise Failure(400, None, str(error)) from None
