# SPDX-License-Identifier: Apache-2.0
"""A vLLM server in virtual time: its engine's loop, and the answers to its requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec
from kvtax.engine.null_engine import cached_tokens
from multidict import CIMultiDict

from kvtax_fleet.records.exposition import Totals, exposition
from kvtax_fleet.records.host_times import RequestTimes
from kvtax_fleet.simulate.cost import request_ns
from kvtax_fleet.simulate.virtual_engine import IDLE_NS, VirtualEngine
from kvtax_fleet.simulate.virtual_loop import VirtualLoop

FIRST_EVENT = b'data: {"choices":[{"token_ids":[0]}]}\n\n'
EVENT = b'data: {"choices":[{}]}\n\n'
DONE = b"data: [DONE]\n\n"


class VirtualRequest(msgspec.Struct, frozen=True):
    """A request to an instance, in place of its JSON."""

    prompt: list[int]
    output_tokens: int
    stream: bool = True
    kv_transfer_params: dict[str, Any] | None = None


class VirtualAnswer:
    """The answer to one request; the proxy takes it for an Answer."""

    first: bytes
    good = True

    def __init__(
        self, instance: VirtualInstance, request_id: str, request: VirtualRequest
    ) -> None:
        self.status = 200
        self._instance = instance
        self._id = request_id
        self._generated = self._streamed = self._cached = 0
        self._chunks: deque[bytes] = deque()
        self._ended = False
        self._more: asyncio.Future[None] = instance.loop.create_future()
        self.prompt_tokens = len(request.prompt)
        self.streams = request.stream

    @property
    def headers(self) -> CIMultiDict[str]:
        return CIMultiDict()

    @property
    def at_end(self) -> bool:
        return self._ended and not self._chunks

    async def begin(self) -> None:
        """Wait for the first chunk."""
        self.first = await self.chunk()

    async def chunk(self) -> bytes:
        """Return the next chunk, b"" at the end."""
        while not self._chunks:
            if self._ended:
                return b""
            self._more = self._instance.loop.create_future()
            await self._more
        return self._chunks.popleft()

    def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        if not self._ended:
            self._instance.abort(self._id)

    def arrive(self, chunk: bytes, last: bool) -> None:
        self._chunks.append(chunk)
        self._ended = last
        if not self._more.done():
            self._more.set_result(None)

    def made(self, output: Any, stream_interval: int, totals: Totals) -> bytes | None:
        """Return the chunk to send now; vLLM puts several tokens into one event."""
        if self._generated == 0 and (counted := cached_tokens(output)):
            self._cached, external = counted
            totals.cached_tokens += self._cached - external
            totals.external_tokens += external
            totals.computed_tokens += self.prompt_tokens - self._cached
        self._generated += len(output.new_token_ids)
        totals.generation_tokens += len(output.new_token_ids)
        last = output.finish_reason is not None
        if not self.streams:
            return self._whole(output) if last else None
        if self._streamed == 0:
            event = FIRST_EVENT
        elif last or self._generated - self._streamed >= stream_interval:
            event = EVENT
        else:
            return None
        self._streamed = self._generated
        return event + self._last_events() if last else event

    def _last_events(self) -> bytes:
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
        event = {"choices": [], "usage": usage}
        return b"data: " + msgspec.json.encode(event) + b"\n\n" + DONE

    def _whole(self, output: Any) -> bytes:
        return msgspec.json.encode({"kv_transfer_params": output.kv_transfer_params})


class _Rest(NamedTuple):
    """Steps that change nothing: the first of them ended at `from_ns`.

    One follows the other, each of `period_ns`, until there is something to do.
    """

    from_ns: int
    period_ns: int

    def step_at(self, ns: int) -> int:
        """Return when the first step at or after `ns` begins."""
        steps = -(-(ns - self.from_ns) // self.period_ns)
        return self.from_ns + max(0, steps) * self.period_ns


class VirtualInstance:
    """A server; it does nothing without requests.

    `times`: the time of requests outside of the engine. `announce` gives the instance
    the time of each report of its workers, before. An engine whose requests all wait
    for KV steps each millisecond, to no effect. With `announce` these steps are left
    out: the next one is that in which something happens.
    """

    def __init__(
        self,
        engine: VirtualEngine,
        loop: VirtualLoop,
        times: RequestTimes,
        announce: Callable[[Callable[[int], None]], None] | None = None,
    ) -> None:
        self.loop = loop
        self.totals = Totals()
        self.engine = engine
        self._times = times
        self._answers: dict[str, VirtualAnswer] = {}
        # Requests, or None for an abort, that came while the engine core was at work.
        self._inbox: list[tuple[str, VirtualRequest | None]] = []
        self._busy = False
        self._may_rest = announce is not None
        if announce is not None:
            announce(self._expect_report)
        self._rest: _Rest | None = None
        # The next step while it rests, and what the last one returned.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._rested: Any = None
        # When workers will have something to report, the soonest first.
        self._reports_ns: list[int] = []
        self._free_ns = 0
        self._count = 0

    def request(self, request: VirtualRequest) -> VirtualAnswer:
        """Hand a request to the server; its answer has not begun."""
        self._count += 1
        request_id = str(self._count)
        answer = VirtualAnswer(self, request_id, request)
        self._answers[request_id] = answer
        own_ns = request_ns(self._times.to_engine, answer.prompt_tokens)
        self._free_ns = max(self._free_ns, self.loop.now_ns()) + own_ns
        self._at(self._free_ns, self._post, request_id, request)
        return answer

    def abort(self, request_id: str) -> None:
        """Give a request up; the engine core learns of it between two steps."""
        if self._answers.pop(request_id, None) is not None:
            self.totals.aborted += 1
            self._post(request_id, None)

    def metrics(self, model: str) -> str:
        """Return the text of its /metrics."""
        return exposition(self.totals, self.engine.gauges, model)

    def _at(self, due_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Schedule `callback` for `due_ns`; call it now if that time has come."""
        if due_ns > self.loop.now_ns():
            self.loop.call_at_ns(due_ns, callback, *args)
        else:
            callback(*args)

    def _post(self, request_id: str, request: VirtualRequest | None) -> None:
        self._inbox.append((request_id, request))
        if not self._busy:
            self._busy = True
            # What arrives at the same moment is in the same step.
            self.loop.call_soon(self._step)
        elif self._rest is not None:
            self._wake(self.loop.now_ns())

    def _step(self) -> None:
        engine = self.engine
        engine.clock.advance_to(self.loop.now_ns())
        for request_id, request in self._inbox:
            if request is None:
                engine.abort(request_id)
            elif request_id in self._answers:
                engine.add(
                    request_id,
                    request.prompt,
                    request.output_tokens,
                    request.kv_transfer_params,
                )
        self._inbox.clear()
        if not engine.has_work:
            self._busy = False
            return
        began_ns = engine.clock.now_ns
        outputs = engine.step()
        quiet = outputs is None or not outputs.outputs
        if self._may_rest and quiet and engine.only_waits_for_kv:
            self._begin_rest(_Rest(engine.clock.now_ns, engine.clock.now_ns - began_ns))
            self._rested = outputs
        else:
            self.loop.call_at_ns(engine.clock.now_ns, self._stepped, outputs)

    def _expect_report(self, at_ns: int) -> None:
        """Note that a worker will report in the first step whose host part ends then.

        Times that come to nothing do no harm.
        """
        heappush(self._reports_ns, at_ns)
        if self._rest is not None:
            self._wake(at_ns - self._rest.period_ns + IDLE_NS)

    def _begin_rest(self, rest: _Rest) -> None:
        """Leave steps out until the next report, or until a message comes."""
        self._rest = rest
        while self._reports_ns and self._reports_ns[0] <= rest.from_ns - IDLE_NS:
            heappop(self._reports_ns)
        if self._reports_ns:
            self._wake(self._reports_ns[0] - rest.period_ns + IDLE_NS)

    def _wake(self, at_ns: int) -> None:
        """Do the first step from `at_ns` on, unless an earlier one is planned.

        Steps that have been left out by now are not made up for.
        """
        assert self._rest is not None
        due_ns = self._rest.step_at(max(at_ns, self.loop.now_ns()))
        if self._timer is not None:
            if self._timer_ns <= due_ns:
                return
            self._timer.cancel()
        self._timer_ns = due_ns
        self._timer = self.loop.call_at_ns(due_ns, self._rise)

    def _rise(self) -> None:
        self._rest = self._timer = None
        self._stepped(self._rested)

    def _stepped(self, outputs: Any) -> None:
        if outputs is not None:
            for output in outputs.outputs:
                self._deliver(output)
            stats = outputs.scheduler_stats.prefix_cache_stats
            self.totals.prefix_cache_queries += stats.queries
            self.totals.prefix_cache_hits += stats.hits
        self._step()

    def _deliver(self, output: Any) -> None:
        answer = self._answers.get(output.request_id)
        if answer is None:
            return
        chunk = answer.made(output, self.engine.stream_interval, self.totals)
        last = output.finish_reason is not None
        if last:
            del self._answers[output.request_id]
            self.totals.finished += 1
        if chunk is not None:
            own_ns = request_ns(self._times.from_engine, answer.prompt_tokens)
            self._at(self.loop.now_ns() + own_ns, answer.arrive, chunk, last)
