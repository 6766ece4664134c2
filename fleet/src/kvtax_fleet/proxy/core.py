# SPDX-License-Identifier: Apache-2.0
"""The proxy without HTTP, by any clock: each request from its arrival to its end line.

`service.py` puts it behind a port; in virtual time it routes to simulated instances.

An answer is passed on byte for byte, without parsing events: the first chunk is the
first token, and tokens, errors and the end are found as bytes. A stream that breaks
off, or ends without its API's end mark ([DONE], for example), ends for the client with
an error event; so does a stream that is cancelled because the proxy stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from time import monotonic_ns
from typing import Generic

from kvtax_fleet.policies import NoInstance, parameters_of
from kvtax_fleet.records.instances import Instance

from .apis import APIS, EVENT_ENDS, with_lf
from .body import Payload
from .decision_log import DecisionLog
from .exchange import Client, Exchange
from .health import Health, Served
from .http_server import ClientStalled
from .kvindexd import Exact
from .loads import FleetLoad, Seat
from .offload import UNTRIED, GivenUp, Offloader
from .router import Mirror, Router
from .session_affinity import Pins
from .settings import Settings
from .upstream import Answer, Failure, Lost, Unreachable, Upstream

# Seconds for clients that read slowly to take the error when the proxy stops.
STOP_GRACE_S = 1.0
STOPPED = "the proxy was stopped"
# Bytes before a chunk that are searched with it: no mark in apis.py is longer.
_TAIL = 32
log = logging.getLogger(__name__)


class Core(Generic[Payload]):
    """Answers completion requests; decides, counts and remembers.

    `settings` are resolved. `exact` is None without `--kvindexd`, `seat` for a proxy of
    one process, `served` where all instances serve the same. `ended` counts requests by
    (instance, status); `failed_open` counts decisions that took ejected instances for
    healthy, because no other was left.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        upstream: Upstream[Payload],
        decisions: DecisionLog,
        exact: Exact[Payload] | None = None,
        now_ns: Callable[[], int] = monotonic_ns,
        seat: Seat | None = None,
        served: Served | None = None,
    ) -> None:
        self.instances = {instance.name: instance for instance in instances}
        rows = () if seat is None else (seat.shared.loads, seat.place)
        self.loads = FleetLoad(self.instances, *rows)
        self.health = Health(instances, self._on_health, now_ns)
        self.mirror = Mirror(len(instances), settings.mirror_tokens)
        self.router = Router(
            instances,
            settings.policy,
            parameters_of(settings.policy, settings.parameters),
            self.mirror,
            self.loads,
            Pins() if seat is None else seat.shared.pins,
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
        self._upstream = upstream
        self._exact = exact
        self._served = served
        self._decisions = decisions
        self._now_ns = now_ns
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self.ended: Counter[tuple[str | None, str]] = Counter()
        self.failed_open = 0

    def _on_health(self, name: str, healthy: bool) -> None:
        """Empty the mirror of an ejected instance: it may restart without a cache."""
        if not healthy:
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
                stalled = isinstance(error, ClientStalled)
                end.status, end.error = "client_gone", str(error) if stalled else None
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
        await exchange.read_body()
        if self._served is not None:
            exchange.lacking = await self._served.lacking(exchange.body.model)
        if self._exact is not None:
            exchange.cached_tokens = await self._exact.cached_tokens(exchange.body)
        self._route(exchange, 0, set())
        tried = {exchange.route.decision.instance}
        with ExitStack() as exchange.visits:
            try:
                if await self._serve(exchange, tried):
                    return
            except Unreachable:
                if len(self.instances) == 1:
                    raise
                self._route(exchange, 1, tried)
            await self._serve(exchange, None)

    def _route(
        self, exchange: Exchange[Payload], attempt: int, tried: set[str]
    ) -> None:
        """Choose a healthy instance that is not in `tried`.

        If there is none, choose as if none were ejected: an ejection is a guess, and no
        other instance is left. Raises Failure.
        """
        try:
            self._choose(exchange, attempt, tried | self.health.unavailable())
        except NoInstance:
            try:
                self._choose(exchange, attempt, tried)
            except NoInstance as error:
                raise Failure(503, None, str(error)) from None
            self.failed_open += 1

    def _choose(
        self, exchange: Exchange[Payload], attempt: int, without: set[str]
    ) -> None:
        """Choose an instance and note it in the exchange. Raises NoInstance."""
        request = exchange.end, exchange.body, exchange.cached_tokens, attempt
        without = without | exchange.lacking
        exchange.route = route = self.router.route(*request, without)
        exchange.end.instance = route.decision.instance

    async def _serve(self, exchange: Exchange[Payload], tried: set[str] | None) -> bool:
        """Request the chosen instance's answer and relay it.

        Returns False instead if the answer of a suspect has failed, and an instance has
        been chosen that is not in `tried` (None: no other may be).
        """
        name = exchange.route.decision.instance
        flight = self.loads.flight(name, exchange.route.prompt_tokens)
        exchange.visits.enter_context(self.health.visit(name))
        with flight as exchange.flight:
            try:
                answer = await self._request(exchange)
            except Failure as failure:
                suspect = self.health.failed(failure)
                if suspect and self._is_checked(exchange, name, tried):
                    return False
                if not isinstance(failure, Lost):
                    self._judge(exchange, name, self.health.acquit)
                raise
            if not _is_good(answer):
                suspect = self.health.answered(name, well=False)
                if suspect and self._is_checked(exchange, name, tried):
                    answer.close()
                    return False
                self._judge(exchange, name, self.health.acquit)
            else:
                self.health.begun(name)
                self._judge(exchange, name, self._blame)
            await self._relay(exchange, answer)
            return True

    def _is_checked(
        self, exchange: Exchange[Payload], suspect: str, tried: set[str] | None
    ) -> bool:
        """Choose an instance that fails less than a suspect; False without one."""
        if tried is None:
            return False
        try:
            self._choose(exchange, 1, tried | self.health.no_witnesses(suspect))
        except NoInstance:
            return False
        exchange.suspects.append(suspect)
        return True

    def _judge(
        self, exchange: Exchange[Payload], name: str, verdict: Callable[[str], None]
    ) -> None:
        """Pass a verdict on the suspects after which `name` has answered."""
        for suspect in exchange.suspects:
            if suspect != name:
                verdict(suspect)

    def _blame(self, name: str) -> None:
        self.health.blame(name, "it has failed requests that another has answered")

    async def _relay(self, exchange: Exchange[Payload], answer: Answer) -> None:
        """Send the answer to the client, and note how it has ended."""
        name, end = exchange.route.decision.instance, exchange.end
        try:
            await relay(exchange, answer, lambda: self.stopping, self._now_ns())
        finally:
            answer.close()
            if answer.lost is not None:
                self.health.failed(answer.lost)
            elif end.status == "ok":
                self.health.answered(name, well=True)
            elif end.status == "failed" and answer.streams:
                self.health.broke(name, str(end.error))

    async def _request(self, exchange: Exchange[Payload]) -> Answer:
        """Return the instance's answer, once its first byte is here."""
        decision = exchange.route.decision
        d = self.instances[decision.instance]
        if decision.prefill is not None:
            p = self.instances[decision.prefill]
            answer = await self._offload(exchange, p, d)
            if answer is not None:
                return answer
        exchange.flight.prefills(exchange.route.new_tokens[d.name])
        payload = exchange.body.raw
        if decision.read_from is not None and exchange.body.api.transfers:
            peer = self.instances[decision.read_from].direct_read
            assert peer is not None  # settings.check
            params = {"direct_read": {"host": peer.host, "port": peer.port}}
            payload = exchange.body.with_transfer(params)
        return await self._upstream.request(d, exchange.path, exchange.headers, payload)

    async def _offload(
        self, exchange: Exchange[Payload], p: Instance, d: Instance
    ) -> Answer | None:
        """Prefill on P and decode on D.

        Returns None if D has to prefill itself; the end line's `fallback` says why.
        """
        end = exchange.end
        exchange.visits.enter_context(self.health.visit(p.name))
        try:
            answer = await self.offloader.offload(exchange, p, d)
        except GivenUp as error:
            refused = error.failure == "prefill_refused"
            if refused and self.health.answered(p.name, well=False):
                exchange.suspects.append(p.name)
            if error.failure not in UNTRIED:
                log.warning("request %s: %s; prefill on %s", end.id, error, d.name)
            end.fallback = str(error)
            return None
        self.health.begun(p.name)
        self.health.answered(p.name, well=True)
        end.prefill_instance = p.name
        return answer


async def relay(
    exchange: Exchange[Payload],
    answer: Answer,
    stopping: Callable[[], bool],
    now_ns: int,
) -> None:
    """Send an answer, begun `now_ns`, to the client; fill in the exchange's end line.

    Raises ConnectionResetError if the client is gone, or takes nothing for too long.
    """
    end, headers, client = exchange.end, answer.headers, exchange.client
    headers["X-Kvtax-Instance"] = str(end.instance)
    if end.prefill_instance is not None:
        headers["X-Kvtax-Prefill"] = end.prefill_instance
    end.http_status = answer.status
    end.first_byte_ns = now_ns
    exchange.flight.first_token()
    if not answer.streams:
        end.status = "ok" if _is_good(answer) else "failed"
        if end.status == "failed":
            # Its text may quote the prompt, as vLLM's does.
            kind = " and no result" if answer.status < 300 else ""
            end.error = f"{end.instance} answered HTTP {answer.status}{kind}"
        client.whole(answer.status, headers, answer.first)
        return
    await client.begin(answer.status, headers)
    failure = None
    try:
        await _stream(exchange, answer)
    except Failure as error:
        end.status, failure = "failed", error
    except asyncio.CancelledError:
        if not stopping():
            raise
        end.status, failure = "proxy_stopped", Failure(502, end.instance, STOPPED)
    if failure is not None:
        end.error = str(failure)
        await client.break_off(failure)
    elif end.error is None:
        end.status = "ok"
    await client.end()


def _is_good(answer: Answer) -> bool:
    """Return whether an answer is a stream or a result in JSON.

    What stands before an instance may answer for it, with a redirect or a page.
    """
    if answer.streams:
        return True
    begin = answer.first[:16].lstrip()
    is_result = begin.startswith(b"{") and not begin.startswith(b'{"error"')
    return 200 <= answer.status < 300 and is_result


async def _stream(exchange: Exchange[Payload], answer: Answer) -> None:
    """Pass the chunks on as fast as the client takes them. Raises Failure.

    A last chunk that is known to be the last goes out in one write with the end.
    """
    client, end = exchange.client, exchange.end
    api, name = APIS[client.path], str(end.instance)
    tail, ending, complete = b"\n", False, False
    chunk = answer.first
    while chunk:
        whole = tail + chunk
        joined = with_lf(whole)
        events = joined.count(api.token) - with_lf(tail).count(api.token)
        exchange.flight.generated(events)
        end.generated_tokens += events
        if any(map(joined.__contains__, api.errors)):
            end.status, end.error = "failed", f"{name} sent an error event"
        ending = ending or any(map(joined.__contains__, api.ends))
        tail = whole[-_TAIL:]
        complete = ending and tail.endswith(EVENT_ENDS)
        if complete and end.error is None:
            # Nothing is missing from here on: OpenAI's client hangs up after [DONE].
            end.status = "ok"
        if complete and answer.at_end:
            await client.end(chunk)
            return
        await client.write(chunk)
        chunk = await answer.chunk()
    if not complete:
        mark = api.ends[0].decode().partition(": ")[2]
        raise Failure(502, name, f"{name} ended its answer without {mark}")
