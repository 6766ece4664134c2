# SPDX-License-Identifier: Apache-2.0
"""Prefill on one instance (P), decode on another (D), with Mooncake or NIXL.

Mooncake: both get their requests at once; P holds the KV under a transfer id, D pulls
it. NIXL: P first; its answer names the place of the KV. Whatever fails or takes too
long before D's first byte ends in D doing the prefill itself, as without an offload.

Giving a pull up aborts a request at D. On vLLM 0.18.1 without the patch
kv_transfer_abort_race that can end D's engine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Generic

import msgspec
from multidict import MultiMapping

from kvtax_fleet.proxy.body import Payload
from kvtax_fleet.proxy.exchange import (
    Answer,
    Exchange,
    Failure,
    Lost,
    Unreachable,
    Upstream,
)
from kvtax_fleet.proxy.health import Health
from kvtax_fleet.proxy.loads import FleetLoad
from kvtax_fleet.records.decisions import Offload, OffloadFailure
from kvtax_fleet.records.instances import Instance

log = logging.getLogger(__name__)
# Sends a request with these kv_transfer_params.
Send = Callable[[dict[str, Any]], Awaitable[Answer]]

# Seconds without offloads of a pair after the first failure; the longest such time.
FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 320.0
UNTRIED: frozenset[OffloadFailure] = frozenset({"not_possible", "resting"})
# Failures in which KV was to arrive and did not.
_NO_KV: frozenset[OffloadFailure] = frozenset({"handover_slow", "no_token"})


class GivenUp(Exception):
    """The offload failed; D has to do the prefill."""

    def __init__(self, failure: OffloadFailure, why: str) -> None:
        super().__init__(why)
        self.failure = failure


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class Backoff:
    """Pairs of instances between which KV did not arrive: left alone for a while.

    A pull that waits for KV in vain (`WAITING_FOR_REMOTE_KVS`) holds its blocks, maybe
    also after it has been given up, and its request has waited for nothing. So a pair
    is left alone after each failure, twice as long each time, until KV arrives again.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        # The end and the length of each pair's time.
        self._pairs: dict[tuple[str, str], tuple[int, float]] = {}

    def left_s(self, p: str, d: str) -> float:
        """Return the seconds for which the pair is still left alone."""
        until_ns, _ = self._pairs.get((p, d), (0, 0.0))
        return max(0.0, (until_ns - self._now_ns()) / 1e9)

    def failed(self, p: str, d: str) -> None:
        """Note that KV did not arrive. Failures under way together count once."""
        if self.left_s(p, d):
            return
        _, before_s = self._pairs.get((p, d), (0, FIRST_BACKOFF_S / 2))
        length_s = min(2 * before_s, LONGEST_BACKOFF_S)
        self._pairs[p, d] = self._now_ns() + int(length_s * 1e9), length_s

    def worked(self, p: str, d: str) -> None:
        self._pairs.pop((p, d), None)


class Offloader(Generic[Payload]):
    """The transfers of decisions that name a prefill instance.

    `prefill_timeout_s`: for P, where the decision has no limit. `handover_timeout_s`:
    from then to D's first byte.
    """

    def __init__(
        self,
        upstream: Upstream[Payload],
        loads: FleetLoad,
        health: Health,
        prefill_timeout_s: float,
        handover_timeout_s: float,
        now_ns: Callable[[], int],
    ) -> None:
        self._upstream = upstream
        self._loads = loads
        self._health = health
        self._prefill_timeout_s = prefill_timeout_s
        self._handover_timeout_s = handover_timeout_s
        self._now_ns = now_ns
        self._backoff = Backoff(now_ns)
        self._engine_ids: dict[str, str] = {}
        self._background: set[asyncio.Future[Answer]] = set()

    async def offload(
        self, exchange: Exchange[Payload], p: Instance, d: Instance
    ) -> Answer:
        """Return D's answer, with the KV from P; record the end line's `offload`.

        Raises GivenUp, or Unreachable for D.
        """
        offload = exchange.end.offload = Offload(p.name, self._now_ns())
        try:
            answer = await self._run(exchange, p, d, offload)
        except GivenUp as error:
            offload.failure = error.failure
            if error.failure in _NO_KV:
                self._backoff.failed(p.name, d.name)
            raise
        except Unreachable:
            offload.failure = "decode_lost"
            raise
        except asyncio.CancelledError:
            offload.failure = "cancelled"
            raise
        finally:
            offload.ended_ns = self._now_ns()
        self._backoff.worked(p.name, d.name)
        return answer

    async def _run(
        self, exchange: Exchange[Payload], p: Instance, d: Instance, offload: Offload
    ) -> Answer:
        self._require_possible(exchange, p, d)
        route, path, headers = exchange.route, exchange.path, exchange.client.headers
        # Counted from the decision on: a policy that caps the offloads under way must
        # see this one at once. Counted until P has answered, which may be after D has.
        counted = ExitStack()
        counted.enter_context(
            self._loads.offload(p.name, route.prompt_tokens, route.new_tokens[p.name])
        )
        limit_s = route.decision.prefill_timeout_s or self._prefill_timeout_s

        async def prefill(params: dict[str, Any]) -> Answer:
            with counted:
                payload = exchange.body.prefill_only(params)
                offload.prefill_asked_ns = self._now_ns()
                answer = await self._prefill(p, path, headers, payload, limit_s)
                offload.prefilled_ns = self._now_ns()
                return answer

        async def decode(params: dict[str, Any]) -> Answer:
            payload = exchange.body.with_transfer(params)
            offload.decode_asked_ns = self._now_ns()
            streams = exchange.body.streams
            return await self._upstream.request(d, path, headers, payload, streams)

        try:
            return await self._transfer(p, d, prefill, decode, limit_s)
        except BaseException:
            counted.close()
            raise

    def _require_possible(
        self, exchange: Exchange[Payload], p: Instance, d: Instance
    ) -> None:
        """Raise GivenUp if the request or the pair rules an offload out."""
        if not exchange.body.single:
            raise GivenUp("not_possible", "several answers are requested")
        if left_s := self._backoff.left_s(p.name, d.name):
            why = (
                f"no KV arrived from {p.name} at {d.name}: "
                f"the pair rests for {left_s:.0f} s"
            )
            raise GivenUp("resting", why)

    async def _transfer(
        self,
        p: Instance,
        d: Instance,
        prefill: Send,
        decode: Send,
        limit_s: float,
    ) -> Answer:
        if d.connector == "nixl":
            prefilled = await prefill({"do_remote_decode": True})
            return await self._decode(decode(_params_of(prefilled, p)), d)
        transfer_id = uuid.uuid4().hex
        pull = await self._pull_params(p, transfer_id, limit_s)
        send = {"do_remote_decode": True, "transfer_id": transfer_id}
        return await self._at_once(prefill(send), decode(pull), d)

    async def _at_once(
        self, prefill: Awaitable[Answer], decode: Awaitable[Answer], d: Instance
    ) -> Answer:
        sending = asyncio.ensure_future(prefill)
        pulling = asyncio.ensure_future(decode)
        try:
            both = {sending, pulling}
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if sending in done:
                sending.result()
            answer = await self._decode(pulling, d)
        except BaseException:
            await _undo(sending, pulling)
            raise
        # D can be faster than P's own answer, which is then dropped.
        self._background.add(sending)
        sending.add_done_callback(self._forget)
        return answer

    def _forget(self, sending: asyncio.Future[Answer]) -> None:
        self._background.discard(sending)
        if not sending.cancelled() and (error := sending.exception()):
            log.warning("after the hand-over: %s", error)

    async def _prefill(
        self,
        p: Instance,
        path: str,
        headers: MultiMapping[str],
        payload: Payload,
        limit_s: float,
    ) -> Answer:
        """Prefill on P; all of its answer becomes its `first`. Raises GivenUp."""
        async with self._within(limit_s, p, "prefill_slow", "prefill_lost"):
            answer = await self._upstream.request(p, path, headers, payload, False)
            answer.close()
        if answer.status != 200:
            why = f"prefill on {p.name}: HTTP {answer.status}"
            raise GivenUp("prefill_refused", why)
        return answer

    @asynccontextmanager
    async def _within(
        self,
        limit_s: float,
        p: Instance,
        slow: OffloadFailure,
        lost: OffloadFailure,
        what: str = "",
    ) -> AsyncIterator[None]:
        """Raise GivenUp if P takes longer inside the context, or fails."""
        try:
            async with asyncio.timeout(limit_s):
                yield
            return
        except TimeoutError:
            why = f"prefill on {p.name}{what} took over {limit_s:g} s"
            failure, error = slow, Failure(504, p.name, why)
        except Failure as raised:
            why = f"prefill on {p.name}: {raised}"
            failure, error = lost, raised
        self._engine_ids.pop(p.name, None)
        self._health.failed(error)
        raise GivenUp(failure, why)

    async def _decode(self, decode: Awaitable[Answer], d: Instance) -> Answer:
        limit_s = self._handover_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await decode
        except TimeoutError:
            why = f"no first byte from {d.name} within {limit_s:g} s of the prefill"
            raise GivenUp("handover_slow", why) from None
        except Unreachable:
            raise
        except Failure as error:
            lost = isinstance(error, Lost)
            raise GivenUp("decode_lost" if lost else "no_token", str(error)) from None
        if answer.status >= 500:
            answer.close()
            why = f"{d.name}: HTTP {answer.status}"
            raise GivenUp("decode_refused", why)
        return answer

    async def _pull_params(
        self, p: Instance, transfer_id: str, limit_s: float
    ) -> dict[str, Any]:
        if p.name not in self._engine_ids:
            what = f": {p.bootstrap_url}"
            no_id: OffloadFailure = "no_engine_id"
            async with self._within(limit_s, p, no_id, no_id, what):
                self._engine_ids[p.name] = await self._upstream.engine_id(p)
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": p.bootstrap_url,
            "remote_engine_id": self._engine_ids[p.name],
        }


def _params_of(prefilled: Answer, p: Instance) -> dict[str, Any]:
    try:
        params = msgspec.json.decode(prefilled.first, type=_Prefilled)
    except (msgspec.DecodeError, RecursionError) as error:
        why = f"{p.name}: unreadable answer: {error}"
        raise GivenUp("no_kv_params", why) from None
    if params.kv_transfer_params is None:
        why = f"{p.name}: no kv_transfer_params in its answer"
        raise GivenUp("no_kv_params", why)
    return params.kv_transfer_params


async def _undo(*tasks: asyncio.Future[Answer]) -> None:
    """Cancel the requests under way, and abort those that have been answered."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, BaseException):
            result.close()
