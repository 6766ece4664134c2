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
from contextlib import ExitStack, suppress
from itertools import count
from time import monotonic_ns
from typing import Any, Generic

from multidict import CIMultiDict, MultiMapping

from kvtax_fleet.policies import POLICIES, parameters_of
from kvtax_fleet.policies.decision import NoInstance
from kvtax_fleet.proxy.apis import APIS, EVENT_ENDS, with_lf
from kvtax_fleet.proxy.body import Payload, RequestBody
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import (
    Answer,
    Client,
    ClientStalled,
    Exact,
    Exchange,
    Failure,
    Lost,
    UnknownModel,
    Unreachable,
    Upstream,
)
from kvtax_fleet.proxy.health import Health, Served
from kvtax_fleet.proxy.loads import FleetLoad, InstanceLoad
from kvtax_fleet.proxy.offload import UNTRIED, GivenUp, Offloader
from kvtax_fleet.proxy.router import Mirror, Router
from kvtax_fleet.proxy.session_affinity import Pins
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance

# Seconds for clients that read slowly to take the error when the proxy stops.
STOP_GRACE_S = 1.0
STOPPED = "the proxy was stopped"
# A client that leaves sooner, in seconds, has changed its mind.
MIN_WAIT_S = 1.0
# Seconds between two readings of the instances' metrics, as llm-d's router has them.
GAUGES_EVERY_S = 0.05
# Bytes before a chunk that are searched with it: no mark in apis.py is longer.
_TAIL = 32
# Statuses by which an instance refuses a request for what it is. Another instance
# would, too.
_REFUSALS = frozenset({400, 404, 405, 409, 411, 413, 415, 422})
# Second attempts under way: this share of the requests in flight, or this number.
MAX_RETRIES_SHARE, MIN_RETRIES = 0.2, 4
log = logging.getLogger(__name__)


class Core(Generic[Payload]):
    """Answers completion requests; decides, counts and remembers.

    `settings` are resolved. `exact` is None without `--kvindexd`, `served` where all
    instances serve the same. `ended` counts requests by (instance, status);
    `failed_open` counts decisions that took ejected instances for healthy, because no
    other was left.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        upstream: Upstream[Payload],
        decisions: DecisionLog,
        exact: Exact[Payload] | None = None,
        now_ns: Callable[[], int] = monotonic_ns,
        served: Served | None = None,
    ) -> None:
        self.instances = {instance.name: instance for instance in instances}
        self.loads = FleetLoad(self.instances)
        self.health = Health(instances, self._on_health, now_ns)
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
        self._upstream = upstream
        self._exact = exact
        self._served = served
        self._decisions = decisions
        self._now_ns = now_ns
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retries = 0
        self._compared: set[str] = set()
        # Requests by the instance that has failed them, while another tries.
        self._doubted: Counter[str] = Counter()
        self.stopping = False
        self.ended: Counter[tuple[str | None, str]] = Counter()
        self.failed_open = 0

    def follow(self, instances: Sequence[Instance]) -> None:
        """Replace the instances; those that stay keep sessions, state and mirror.

        Requests in flight end where they are.
        """
        before = list(self.instances.values())
        places = [before.index(each) if each in before else None for each in instances]
        self.instances = {instance.name: instance for instance in instances}
        self.loads.follow(self.instances)
        self.health.follow(instances)
        self.mirror.follow(places)
        self.router.follow(instances)
        if self._served is not None:
            self._served.follow(instances)

    def _on_health(self, name: str, healthy: bool) -> None:
        """Empty the mirror of an ejected instance: it may restart without a cache."""
        if not healthy:
            self.mirror.clear(list(self.instances).index(name))

    @property
    def busy(self) -> bool:
        """True while a request is under way."""
        return bool(self._tasks)

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
        await exchange.read_body()
        if self._served is not None:
            exchange.lacking = await self._served.lacking(exchange.body.model)
        if self._exact is not None:
            exchange.cached_tokens = await self._exact.cached_tokens(exchange.body)
        self._route(exchange, 0, set())
        with ExitStack() as exchange.in_flight:
            exchange.in_flight.callback(self._end_doubts, exchange)
            if await self._attempt(exchange, is_last=False):
                return
            self._retries += 1
            exchange.in_flight.callback(self._end_retry)
            await self._attempt(exchange, is_last=True)

    def _end_retry(self) -> None:
        self._retries -= 1

    def _route(
        self, exchange: Exchange[Payload], attempt: int, tried: set[str]
    ) -> None:
        """Choose a healthy instance that is not in `tried`, nor compared with another.

        A suspect gets nothing while another tries what it has failed: it would be idle.

        If there is none, choose as if none were ejected: an ejection is a guess, and no
        other instance is left. Raises Failure.
        """
        try:
            model = exchange.body.model
            out = self.health.unavailable(model) | self._compared
            out |= self.health.suspects(self._doubted, model)
            self._choose(exchange, attempt, tried | out)
        except NoInstance:
            try:
                self._choose(exchange, attempt, tried)
            except NoInstance as error:
                raise Failure(503, None, str(error)) from None
            self.failed_open += 1

    def _choose(
        self, exchange: Exchange[Payload], attempt: int, without: set[str]
    ) -> None:
        request = exchange.end, exchange.body, exchange.cached_tokens, attempt
        without = without | exchange.lacking
        exchange.route = route = self.router.route(*request, without)
        exchange.end.instance = route.decision.instance

    async def _attempt(self, exchange: Exchange[Payload], is_last: bool) -> bool:
        """Request the chosen instance's answer and relay it.

        Returns False instead if it has failed and another instance has been chosen.
        Nothing has been sent to the client then.
        """
        name, sender = exchange.route.decision.instance, exchange.sender
        model, began_ns = exchange.body.model, self._now_ns()
        flight = self.loads.flight(name, exchange.route.prompt_tokens)
        exchange.in_flight.enter_context(self.health.attempt(name, model))
        with flight as exchange.flight:
            try:
                answer = await self._request(exchange)
            except asyncio.CancelledError:
                if not (self.stopping or exchange.body.streams):
                    self._left(exchange, name, (self._now_ns() - began_ns) / 1e9)
                raise
            except Failure as failure:
                suspect = self.health.failed(failure, model, sender)
                if not is_last and self._is_moved(exchange, failure, suspect):
                    return False
                self._judge(exchange, name, well=False)
                raise
            if answer.good:
                self.health.begun(name, model)
                self._judge(exchange, name, well=True)
                await self._relay(exchange, answer)
                return True
            suspect = self.health.answered(name, model, sender, well=False)
            if not is_last:
                refusal = Failure(answer.status, name, "")
                if answer.status == 404:
                    await self._find_model(exchange)
                if self._is_moved(exchange, refusal, suspect):
                    answer.close()
                    return False
            self._judge(exchange, name, well=False)
            await self._relay(exchange, answer)
            return True

    async def _find_model(self, exchange: Exchange[Payload]) -> None:
        """Read which instances serve the model, after one that does not."""
        if self._served is None or exchange.body.model is None:
            return
        await self._served.read_again()
        with suppress(UnknownModel):
            exchange.lacking = await self._served.lacking(exchange.body.model)

    def _is_moved(
        self, exchange: Exchange[Payload], failure: Failure, suspect: bool
    ) -> bool:
        """Choose another instance for a request that has failed; False without one."""
        name = exchange.route.decision.instance
        if isinstance(failure, Unreachable):
            if len(self.instances) == 1:
                return False
            self._route(exchange, 1, {name})
            return True
        refused = failure.status in _REFUSALS and name not in exchange.lacking
        limit = max(MIN_RETRIES, MAX_RETRIES_SHARE * len(self._tasks))
        if (refused and not suspect) or self._retries >= limit:
            return False
        model = exchange.body.model
        records = [self.health.without_better_record(name, model)]
        if not suspect:
            records.append(self.health.unavailable(model))
        for out in records:
            with suppress(NoInstance):
                self._choose(exchange, 1, out | {name})
                self._doubt(exchange, name)
                return True
        return False

    def _judge(self, exchange: Exchange[Payload], name: str, well: bool) -> None:
        """Pass a verdict on the instances after which `name` has answered."""
        failed = [other for other in exchange.failed if other != name]
        self.health.judge(failed, exchange.body.model, well)
        self._end_doubts(exchange)

    def _doubt(self, exchange: Exchange[Payload], name: str) -> None:
        """Note that an instance has failed a request, until there is a verdict."""
        exchange.failed.append(name)
        self._doubted[name] += 1

    def _end_doubts(self, exchange: Exchange[Payload]) -> None:
        self._doubted -= Counter(exchange.failed)
        exchange.failed.clear()

    async def _relay(self, exchange: Exchange[Payload], answer: Answer) -> None:
        name, end = exchange.route.decision.instance, exchange.end
        try:
            await relay(exchange, answer, lambda: self.stopping, self._now_ns())
        finally:
            answer.close()
            if end.status == "ok":
                model, sender = exchange.body.model, exchange.sender
                self.health.answered(name, model, sender, well=True)
            elif end.status == "failed" and answer.good:
                self._broke(exchange, name)

    def _left(self, exchange: Exchange[Payload], name: str, waited_s: float) -> None:
        """Note a client that has left before an answer that is no stream.

        The instance may be mute. It has failed if another answers in less time.
        """
        if waited_s >= MIN_WAIT_S:
            self._broke(exchange, name, waited_s)

    def _broke(
        self, exchange: Exchange[Payload], name: str, limit_s: float | None = None
    ) -> None:
        """Note an answer that has failed after its beginning, or did not begin.

        The client has a part of it, or is gone, so that no other may follow. Another
        instance answers the request of a suspect for the verdict alone.
        """
        model = exchange.body.model
        suspect = self.health.answered(name, model, exchange.sender, well=False)
        if not suspect or name in self._compared:
            return
        worse = self.health.without_better_record(name, model)
        out = worse | exchange.lacking | {name}
        others = [other for other in self.instances.values() if other.name not in out]
        if not others:
            return
        witness = min(others, key=lambda other: self.loads[other.name].requests)
        self._compared.add(name)
        task = asyncio.create_task(self._compare(exchange, name, witness, limit_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(
        self,
        exchange: Exchange[Payload],
        suspect: str,
        witness: Instance,
        limit_s: float | None,
    ) -> None:
        """Send the request to the witness; mark the suspect if that answers well."""
        copy = Exchange(_Nobody(exchange.client, exchange.body), exchange.end.number)
        copy.end.instance, copy.body = witness.name, exchange.body
        try:
            flight = self.loads.flight(witness.name, copy.body.prompt_tokens)
            with flight as copy.flight:
                async with asyncio.timeout(limit_s):
                    answer = await self._send(copy, witness, copy.body.raw)
                    try:
                        await relay(copy, answer, lambda: True, self._now_ns())
                    finally:
                        answer.close()
        except (Failure, TimeoutError):
            copy.end.status = "failed"
        finally:
            self._compared.discard(suspect)
        if copy.end.status == "ok":
            why = "its answers fail after their beginning, or do not begin"
            self.health.mark_outlier(suspect, copy.body.model, why, to_end=True)
        elif copy.end.status == "failed":
            self.health.clear(suspect, copy.body.model)

    async def _request(self, exchange: Exchange[Payload]) -> Answer:
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
        return await self._send(exchange, d, payload)

    async def _send(
        self, exchange: Exchange[Payload], instance: Instance, payload: Payload
    ) -> Answer:
        headers = exchange.client.headers
        async with self.health.until_down(instance.name):
            return await self._upstream.request(
                instance, exchange.path, headers, payload, exchange.body.streams
            )

    async def _offload(
        self, exchange: Exchange[Payload], p: Instance, d: Instance
    ) -> Answer | None:
        """Prefill on P and decode on D.

        Returns None if D has to prefill itself; the end line's `fallback` says why.
        """
        end = exchange.end
        model, sender = exchange.body.model, exchange.sender
        exchange.in_flight.enter_context(self.health.attempt(p.name, model))
        try:
            answer = await self.offloader.offload(exchange, p, d)
        except GivenUp as error:
            refused = error.failure == "prefill_refused"
            if refused and self.health.answered(p.name, model, sender, well=False):
                self._doubt(exchange, p.name)
            if error.failure not in UNTRIED:
                log.warning("request %s: %s; prefill on %s", end.id, error, d.name)
            end.fallback = str(error)
            return None
        self.health.begun(p.name, model)
        self.health.answered(p.name, model, sender, well=True)
        end.prefill_instance = p.name
        return answer


class _Nobody(Generic[Payload]):
    """A Client that takes an answer for the sake of its end."""

    name = ""

    def __init__(self, client: Client[Payload], body: RequestBody[Payload]) -> None:
        self.path, self.headers, self._body = client.path, client.headers, body

    async def body(self) -> RequestBody[Payload]:
        return self._body

    def refuse(self, failure: Failure) -> None:
        """Do nothing."""

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        """Do nothing."""

    async def write(self, chunk: bytes) -> None:
        """Do nothing."""

    async def end(self, chunk: bytes = b"") -> None:
        """Do nothing."""

    async def break_off(self, failure: Failure) -> None:
        """Do nothing."""


async def relay(
    exchange: Exchange[Any],
    answer: Answer,
    stopping: Callable[[], bool],
    now_ns: int,
) -> None:
    """Send an answer, begun `now_ns`, to the client; fill in the exchange's end line.

    Raises ConnectionResetError if the client is gone, or takes nothing for too long;
    and Lost if an answer that is no stream breaks off.
    """
    end, client = exchange.end, exchange.client
    headers: CIMultiDict[str] = answer.headers
    headers["X-Kvtax-Instance"] = str(end.instance)
    if end.prefill_instance is not None:
        headers["X-Kvtax-Prefill"] = end.prefill_instance
    end.http_status = answer.status
    end.first_byte_ns = now_ns
    exchange.flight.first_token()
    await client.begin(answer.status, headers)
    if not answer.streams:
        await _pass_on(exchange, answer)
        return
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


async def _pass_on(exchange: Exchange[Any], answer: Answer) -> None:
    """Pass on an answer that is no stream as it comes. Raises Lost."""
    client, end, chunk = exchange.client, exchange.end, answer.first
    try:
        while not answer.at_end:
            await client.write(chunk)
            chunk = await answer.chunk()
    except Lost:
        end.status = "failed"
        raise
    end.status = "ok" if answer.good else "failed"
    if not answer.good:
        # Its text may quote the prompt, as vLLM's does.
        kind = " and no result" if answer.status < 300 else ""
        end.error = f"{end.instance} answered HTTP {answer.status}{kind}"
    await client.end(chunk)


async def _stream(exchange: Exchange[Any], answer: Answer) -> None:
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
        if api.errors.search(joined):
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
