# SPDX-License-Identifier: Apache-2.0
"""Prefill on one instance (P), decode on another (D), with Mooncake or NIXL.

Mooncake: both are asked at once; P holds the KV under a transfer id, D pulls it. NIXL:
P first; its answer says where D finds the KV. Whatever fails or takes too long before
D's first byte ends in D doing the prefill itself, as if nothing had been offloaded.

Giving a pull up aborts a request at D. On vLLM 0.18.1 without the patch
kv_transfer_abort_race that can end D's engine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import msgspec
from multidict import MultiMapping

from lab.records.decisions import Offload, OffloadFailure
from lab.records.instances import Instance

from .exchange import Exchange
from .health import Health
from .loads import FleetLoad
from .offload_account import OffloadAccount
from .rests import Rests
from .upstream import Answer, Failure, Lost, Unreachable, Upstream

log = logging.getLogger(__name__)
# Sends a request with these kv_transfer_params.
Asking = Callable[[dict[str, Any]], Awaitable[Answer]]


UNTRIED = frozenset({"not_possible", "resting"})
# Where KV was to arrive and did not.
_IN_VAIN = frozenset({"handover_slow", "no_token"})


class GivenUp(Exception):
    """The offload did not work out; D has to do the prefill."""

    def __init__(self, failure: OffloadFailure, why: str) -> None:
        super().__init__(why)
        self.failure = failure


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class Offloader:
    """`prefill_timeout_s` for P, where the decision does not say; `handover_timeout_s`
    from then to D's first byte.
    """

    def __init__(
        self,
        upstream: Upstream,
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
        self._rests = Rests(now_ns)
        self._engine_ids: dict[str, str] = {}
        self._background: set[asyncio.Task] = set()
        self.account = OffloadAccount()

    async def ask(self, exchange: Exchange, p: Instance, d: Instance) -> Answer:
        """D's answer, with the KV from P; the end line's `offload` says how it went.

        Raises GivenUp, or Unreachable for D.
        """
        offload = exchange.end.offload = Offload(p.name, self._now_ns())
        try:
            answer = await self._asked(exchange, p, d, offload)
        except GivenUp as error:
            offload.failure = error.failure
            if error.failure in _IN_VAIN:
                self._rests.failed(p.name, d.name)
            raise
        except Unreachable:
            offload.failure = "decode_lost"
            raise
        except asyncio.CancelledError:
            offload.failure = "cancelled"
            raise
        finally:
            offload.ended_ns = self._now_ns()
            self.account.add(offload)
        self._rests.worked(p.name, d.name)
        return answer

    async def _asked(
        self, exchange: Exchange, p: Instance, d: Instance, offload: Offload
    ) -> Answer:
        self._require_possible(exchange, p, d)
        route, path, headers = exchange.route, exchange.path, exchange.headers
        # Counted from the decision on: a policy that caps the offloads under way must
        # see this one at once. Counted until P has answered, which may be after D has.
        counted = ExitStack()
        counted.enter_context(
            self._loads.offload(p.name, route.prompt_tokens, route.new_tokens[p.name])
        )
        limit_s = route.decision.prefill_timeout_s or self._prefill_timeout_s

        async def prefill(params: dict[str, Any]) -> Answer:
            with counted:
                body = exchange.body.prefill_only(params)
                offload.prefill_asked_ns = self._now_ns()
                answer = await self._prefill(p, path, headers, body, limit_s)
                offload.prefilled_ns = self._now_ns()
                return answer

        async def decode(params: dict[str, Any]) -> Answer:
            body = exchange.body.with_transfer(params)
            offload.decode_asked_ns = self._now_ns()
            return await self._upstream.ask(d, path, headers, body)

        try:
            return await self._transferred(p, d, prefill, decode, limit_s)
        except BaseException:
            counted.close()
            raise

    def _require_possible(self, exchange: Exchange, p: Instance, d: Instance) -> None:
        """Raises GivenUp."""
        if not exchange.body.api.transfers:
            raise GivenUp("not_possible", f"{exchange.path} knows of no transfers")
        if not exchange.body.single:
            raise GivenUp("not_possible", "asks for several answers")
        if left_s := self._rests.left_s(p.name, d.name):
            why = f"no KV came from {p.name} to {d.name}: not tried for {left_s:.0f} s"
            raise GivenUp("resting", why)

    async def _transferred(
        self,
        p: Instance,
        d: Instance,
        prefill: Asking,
        decode: Asking,
        limit_s: float,
    ) -> Answer:
        """D's answer, by the protocol that D's connector has."""
        if d.connector == "nixl":
            prefilled = await prefill({"do_remote_decode": True})
            return await self._handed_over(decode(_params_of(prefilled, p)), d)
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
            answer = await self._handed_over(pulling, d)
        except BaseException:
            await _undo(sending, pulling)
            raise
        # D can be faster than P's own answer, which then comes to nobody.
        self._background.add(sending)
        sending.add_done_callback(self._forget)
        return answer

    def _forget(self, sending: asyncio.Task) -> None:
        self._background.discard(sending)
        if not sending.cancelled() and (error := sending.exception()):
            log.warning("after the hand-over: %s", error)

    async def _prefill(
        self,
        p: Instance,
        path: str,
        headers: MultiMapping[str],
        body: bytes,
        limit_s: float,
    ) -> Answer:
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._upstream.ask(p, path, headers, body)
        except TimeoutError:
            what = f"prefill on {p.name} took over {limit_s:g} s"
            self._give_up(p, Lost(504, p.name, what), "prefill_slow", what)
        except Failure as error:
            why = f"prefill on {p.name}: {error}"
            self._give_up(p, error, "prefill_lost", why)
        answer.close()
        if answer.status != 200:
            text = answer.first[:300].decode(errors="replace")
            why = f"prefill on {p.name}: HTTP {answer.status}: {text}"
            raise GivenUp("prefill_refused", why)
        return answer

    def _give_up(
        self, p: Instance, error: Failure, failure: OffloadFailure, why: str
    ) -> NoReturn:
        self._engine_ids.pop(p.name, None)
        self._health.failed(error)
        raise GivenUp(failure, why)

    async def _handed_over(self, decode: Awaitable[Answer], d: Instance) -> Answer:
        limit_s = self._handover_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await decode
        except TimeoutError:
            what = f"no first byte from {d.name} within {limit_s:g} s of the prefill"
            raise GivenUp("handover_slow", what) from None
        except Unreachable:
            raise
        except Failure as error:
            failure = "decode_lost" if isinstance(error, Lost) else "no_token"
            raise GivenUp(failure, str(error)) from None
        if answer.status >= 500:
            answer.close()
            text = answer.first[:300].decode(errors="replace")
            why = f"{d.name}: HTTP {answer.status}: {text}"
            raise GivenUp("decode_refused", why)
        return answer

    async def _pull_params(
        self, p: Instance, transfer_id: str, limit_s: float
    ) -> dict[str, Any]:
        if p.name not in self._engine_ids:
            self._engine_ids[p.name] = await self._engine_id(p, limit_s)
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": p.bootstrap_url,
            "remote_engine_id": self._engine_ids[p.name],
        }

    async def _engine_id(self, p: Instance, limit_s: float) -> str:
        """P's engine id, as its bootstrap server has it."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._upstream.engine_id(p)
        except TimeoutError:
            what = f"prefill on {p.name}: {p.bootstrap_url} took over {limit_s:g} s"
            self._give_up(p, Lost(504, p.name, what), "no_engine_id", what)
        except Failure as error:
            self._give_up(p, error, "no_engine_id", f"prefill on {p.name}: {error}")


def _params_of(prefilled: Answer, p: Instance) -> dict[str, Any]:
    try:
        params = msgspec.json.decode(prefilled.first, type=_Prefilled)
    except msgspec.DecodeError as error:
        why = f"{p.name}: unreadable answer: {error}"
        raise GivenUp("no_kv_params", why) from None
    if params.kv_transfer_params is None:
        why = f"{p.name}: no kv_transfer_params in its answer"
        raise GivenUp("no_kv_params", why)
    return params.kv_transfer_params


async def _undo(*tasks: asyncio.Task) -> None:
    """Cancel what runs, and abort what has been answered meanwhile."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Answer):
            result.close()
