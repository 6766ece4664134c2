# SPDX-License-Identifier: Apache-2.0
"""A completion request from its arrival to its end line, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from itertools import count

from fleet.policies import NoInstance
from lab.records.instances import Instance

from .client import Client
from .decision_log import DecisionLog
from .exchange import Exchange
from .health import Health
from .http.request import ClientStalled
from .kvindexd import Exact
from .loads import FleetLoad
from .offload import UNTRIED, GivenUp, Offloader
from .relay import STOPPED, relay
from .router import Route, Router
from .upstream import Answer, Failure, Unreachable, Upstream

# A client that reads slowly cannot be told at once that the proxy stops.
STOP_GRACE_S = 1.0
log = logging.getLogger(__name__)


class Handler:
    """Answers completion requests.

    `ended` counts the requests that ended, by (instance, status); `failed_open` the
    decisions that took ejected instances for healthy, because nobody else was left.
    """

    def __init__(
        self,
        upstream: Upstream,
        instances: dict[str, Instance],
        router: Router,
        exact: Exact | None,
        loads: FleetLoad,
        health: Health,
        offloader: Offloader,
        decisions: DecisionLog,
        now_ns: Callable[[], int],
    ) -> None:
        self._upstream = upstream
        self._instances = instances
        self._router = router
        self._exact = exact
        self._loads = loads
        self._health = health
        self._offloader = offloader
        self._decisions = decisions
        self._now_ns = now_ns
        self._numbers = count()
        self._tasks: set[asyncio.Task] = set()
        self.stopping = False
        self.ended: Counter[tuple[str | None, str]] = Counter()
        self.failed_open = 0

    async def handle(self, client: Client) -> None:
        """What one of the APIs is asked."""
        exchange = Exchange(client, next(self._numbers))
        end = exchange.end
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._answered(exchange)
        except Failure as failure:
            self._refuse(exchange, failure)
        except (asyncio.CancelledError, ConnectionResetError) as error:
            if self.stopping:
                end.status, end.error = "proxy_stopped", STOPPED
                client.refuse(Failure(503, None, STOPPED))
                return
            if end.status is None:
                stalled = isinstance(error, ClientStalled)
                end.status, end.error = "client_gone", str(error) if stalled else None
            if isinstance(error, asyncio.CancelledError):
                raise
        except Exception as error:
            log.exception("request %s", end.id)
            what = f"the proxy failed: {type(error).__name__}: {error}"
            self._refuse(exchange, Failure(500, None, what))
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

    def _refuse(self, exchange: Exchange, failure: Failure) -> None:
        end = exchange.end
        refused = failure.status < 500 or failure.instance is None
        end.status = "refused" if refused else "failed"
        end.error, end.http_status = str(failure), failure.status
        exchange.client.refuse(failure)

    async def _answered(self, exchange: Exchange) -> None:
        await exchange.read_body()
        if self._exact is not None:
            exchange.cached_tokens = await self._exact.cached_tokens(exchange.body)
        tried: set[str] = set()
        for attempt in (0, 1):
            route = self._route(exchange, attempt, tried)
            name = route.decision.instance
            try:
                with self._loads.flight(name, route.prompt_tokens) as exchange.flight:
                    await self._relayed(exchange)
                    return
            except Failure as error:
                self._health.failed(error)
                tried.add(name)
                another = attempt == 0 and len(tried) < len(self._instances)
                if not (another and isinstance(error, Unreachable)):
                    raise
        raise AssertionError

    def _route(self, exchange: Exchange, attempt: int, tried: set[str]) -> Route:
        """Choose an instance that is not in `tried`, and note it in the exchange."""
        try:
            route = self._open_route(exchange, attempt, tried)
        except NoInstance as error:
            raise Failure(503, None, str(error)) from None
        exchange.route, exchange.end.instance = route, route.decision.instance
        return route

    def _open_route(self, exchange: Exchange, attempt: int, tried: set[str]) -> Route:
        """One of the healthy instances; if there is none, as if none were ejected.

        An ejection is a guess, and nobody else is left. Raises NoInstance.
        """
        asked = exchange.end, exchange.body, exchange.cached_tokens, attempt
        try:
            return self._router.route(*asked, tried | self._health.ejected)
        except NoInstance:
            route = self._router.route(*asked, tried)
            self.failed_open += 1
            return route

    async def _relayed(self, exchange: Exchange) -> None:
        answer = await self._asked(exchange)
        try:
            await relay(exchange, answer, lambda: self.stopping, self._now_ns())
        finally:
            answer.close()
            if answer.lost is not None:
                self._health.failed(answer.lost)
        if exchange.end.status == "ok":
            self._health.succeeded(exchange.end.instance)

    async def _asked(self, exchange: Exchange) -> Answer:
        """The instance's answer, once its first byte is here."""
        decision = exchange.route.decision
        d = self._instances[decision.instance]
        if decision.prefill is not None:
            p = self._instances[decision.prefill]
            answer = await self._offloaded(exchange, p, d)
            if answer is not None:
                return answer
        exchange.flight.prefills(exchange.route.new_tokens[d.name])
        raw = exchange.body.raw
        if decision.read_from is not None and exchange.body.api.transfers:
            peer = self._instances[decision.read_from].direct_read
            params = {"direct_read": {"host": peer.host, "port": peer.port}}
            raw = exchange.body.with_transfer(params)
        return await self._upstream.ask(d, exchange.path, exchange.headers, raw)

    async def _offloaded(
        self, exchange: Exchange, p: Instance, d: Instance
    ) -> Answer | None:
        """None if D has to prefill itself; the end line's `fallback` then says why."""
        end = exchange.end
        try:
            answer = await self._offloader.ask(exchange, p, d)
        except GivenUp as error:
            if error.failure not in UNTRIED:
                log.warning("request %s: %s; prefill on %s", end.id, error, d.name)
            end.fallback = str(error)
            return None
        end.prefill_instance = p.name
        return answer
