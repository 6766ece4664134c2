# SPDX-License-Identifier: Apache-2.0
"""The proxy without HTTP, by any clock: each request from its arrival to its end line.

`service.py` puts it behind a port; in virtual time it routes to simulated instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic_ns
from typing import Generic

from kvtax_fleet.policies import POLICIES, parameters_of
from kvtax_fleet.policies.decision import NoInstance
from kvtax_fleet.proxy.body import Payload
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import (
    Answer,
    Client,
    Exact,
    Exchange,
    Failure,
    Lost,
    Silent,
    Unreachable,
    Upstream,
)
from kvtax_fleet.proxy.health import Health
from kvtax_fleet.proxy.loads import FleetLoad, InstanceLoad
from kvtax_fleet.proxy.offload import UNTRIED, GivenUp, Offloader
from kvtax_fleet.proxy.pins import Pins
from kvtax_fleet.proxy.relay import STOPPED, relay
from kvtax_fleet.proxy.router import Mirror, Router
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance

# Seconds for clients that read slowly to take the error when the proxy stops.
STOP_GRACE_S = 1.0
# Seconds between two readings of the instances' metrics, as llm-d's router has them.
GAUGES_EVERY_S = 0.05
log = logging.getLogger(__name__)


class Core(Generic[Payload]):
    """The way of completion requests, and all counts of them.

    `settings` are resolved. `exact` is None where the mirror estimates what is cached.
    `ended` counts requests by (instance, status).
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        upstream: Upstream[Payload],
        decisions: DecisionLog,
        exact: Exact[Payload] | None = None,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.instances = {instance.name: instance for instance in instances}
        self.loads = FleetLoad(self.instances)
        self.health = Health(instances, self._is_busy, self._on_out)
        self.mirror = Mirror(len(instances), settings.mirror_tokens)
        self.router = Router(
            instances,
            settings.policy,
            parameters_of(settings.policy, settings.parameters),
            self.mirror,
            self.loads,
            Pins(),
            decisions,
            now_ns,
        )
        self.offloader = Offloader(
            upstream,
            self.loads,
            self.health,
            settings.prefill_timeout_s,
            settings.handover_timeout_s,
            now_ns,
        )
        self._reads_gauges = POLICIES[settings.policy].reads_gauges
        self._wait_limit_s = settings.silence_timeout_s
        self._upstream = upstream
        self._exact = exact
        self._decisions = decisions
        self._now_ns = now_ns
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self.ended: Counter[tuple[str | None, str]] = Counter()

    def _is_busy(self, name: str) -> bool:
        return self.loads[name].requests > 0

    def _on_out(self, name: str) -> None:
        """Empty the mirror of an instance: it may restart without a cache."""
        self.mirror.clear(list(self.instances).index(name))

    async def handle(self, client: Client[Payload]) -> None:
        """Answer a request to one of the APIs."""
        exchange = Exchange(client, next(self._numbers))
        end = exchange.end
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(exchange)
        except Failure as failure:
            self._refuse(exchange, failure)
        except (asyncio.CancelledError, ConnectionResetError) as error:
            if self.stopping:
                end.status, end.error = "proxy_stopped", STOPPED
                client.refuse(Failure(503, None, STOPPED))
                return
            if end.status is None:
                end.status = "client_gone"
            if isinstance(error, asyncio.CancelledError):
                raise
        except Exception as error:
            log.exception("request %s", end.id)
            message = f"the proxy failed: {type(error).__name__}"
            self._refuse(exchange, Failure(500, None, message, str(error)))
        finally:
            self._tasks.discard(task)
            self._decisions.ended(end)
            self.ended[end.instance, str(end.status)] += 1

    async def read_gauges_forever(self) -> None:
        """Read the instances' metrics at intervals, if the policy goes by them."""
        while self._reads_gauges:
            loads = [(each, self.loads[name]) for name, each in self.instances.items()]
            await asyncio.gather(*(self._read_gauges(*each) for each in loads))
            await asyncio.sleep(GAUGES_EVERY_S)

    async def _read_gauges(self, instance: Instance, load: InstanceLoad) -> None:
        try:
            gauges = await self._upstream.gauges(instance)
        except Failure:
            load.waiting = load.kv_used = None
        else:
            load.waiting, load.kv_used = gauges.waiting, gauges.usage

    async def stop(self) -> None:
        """End the requests in flight, each with an error and an end line."""
        self.stopping = True
        for _ in range(2):
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)

    def _refuse(self, exchange: Exchange[Payload], failure: Failure) -> None:
        end = exchange.end
        refused = failure.status < 500 or failure.instance is None
        end.status = "refused" if refused else "failed"
        end.error, end.http_status = str(failure), failure.status
        exchange.client.refuse(failure)

    async def _answer(self, exchange: Exchange[Payload]) -> None:
        """Answer the request, by another instance if the connection to one is lost.

        A request that did not reach an instance may be tried at all of them, one that
        was lost there at one more. Nothing has been sent to the client then.
        """
        await exchange.read_body()
        if self._exact is not None:
            exchange.cached_tokens = await self._exact.cached_tokens(exchange.body)
        for attempt in count():
            await self._route(exchange, attempt)
            name = exchange.route.decision.instance
            with self.loads.flight(name, exchange.route.prompt_tokens) as flight:
                exchange.flight = flight
                try:
                    answer = await self._request(exchange)
                except Lost as failure:
                    self.health.failed(failure)
                    if self._is_last(failure, attempt):
                        raise
                    continue
                await self._relay(exchange, answer)
                return

    def _is_last(self, failure: Lost, attempt: int) -> bool:
        if failure.instance is None or isinstance(failure, Silent):
            return True
        limit = len(self.instances) if isinstance(failure, Unreachable) else 1
        return attempt >= limit

    async def _route(self, exchange: Exchange[Payload], attempt: int) -> None:
        """Choose an instance; where all that could answer are out, wait for one.

        Raises Failure.
        """
        request = exchange.end, exchange.body, exchange.cached_tokens, attempt
        try:
            async with asyncio.timeout(self._wait_limit_s):
                while True:
                    try:
                        route = self.router.route(*request, self.health.out)
                        break
                    except NoInstance:
                        if not self.health.out:
                            raise
                        await self.health.until_return()
        except TimeoutError:
            why = f"no instance has come back for {self._wait_limit_s:g} s"
            raise Failure(503, None, why) from None
        except NoInstance as error:
            raise Failure(503, None, str(error)) from None
        exchange.route = route
        exchange.end.instance = route.decision.instance

    async def _relay(self, exchange: Exchange[Payload], answer: Answer) -> None:
        try:
            failure = await relay(
                exchange, answer, lambda: self.stopping, self._now_ns()
            )
        finally:
            answer.close()
        if failure is not None:
            self.health.failed(failure)

    async def _request(self, exchange: Exchange[Payload]) -> Answer:
        """Request the chosen instance's answer. Raises Failure."""
        decision = exchange.route.decision
        d = self.instances[decision.instance]
        if decision.prefill is not None:
            p = self.instances[decision.prefill]
            answer = await self._offload(exchange, p, d)
            if answer is not None:
                return answer
        exchange.flight.prefills(exchange.route.new_tokens[d.name])
        headers, body = exchange.client.headers, exchange.body
        return await self._upstream.request(
            d, exchange.path, headers, body.raw, body.streams
        )

    async def _offload(
        self, exchange: Exchange[Payload], p: Instance, d: Instance
    ) -> Answer | None:
        """Prefill on P and decode on D.

        Returns None if D has to prefill itself; the end line's `fallback` says why.
        """
        end = exchange.end
        try:
            answer = await self.offloader.offload(exchange, p, d)
        except GivenUp as error:
            if error.failure not in UNTRIED:
                log.warning("request %s: %s; prefill on %s", end.id, error, d.name)
            end.fallback = str(error)
            return None
        end.prefill_instance = p.name
        return answer
