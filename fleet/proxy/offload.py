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

from lab.records.instances import Instance

from .exchange import Exchange
from .health import Health
from .loads import FleetLoad
from .upstream import Answer, Failure, Lost, Unreachable, Upstream

log = logging.getLogger(__name__)
# Sends a request with these kv_transfer_params.
Asking = Callable[[dict[str, Any]], Awaitable[Answer]]


class GivenUp(Exception):
    """The offload did not work out; D has to do the prefill."""


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class Offloader:
    """`prefill_timeout_s` for P; `handover_timeout_s` from then to D's first byte."""

    def __init__(
        self,
        upstream: Upstream,
        loads: FleetLoad,
        health: Health,
        prefill_timeout_s: float,
        handover_timeout_s: float,
    ) -> None:
        self._upstream = upstream
        self._loads = loads
        self._health = health
        self._prefill_timeout_s = prefill_timeout_s
        self._handover_timeout_s = handover_timeout_s
        self._engine_ids: dict[str, str] = {}
        self._background: set[asyncio.Task] = set()

    async def ask(self, exchange: Exchange, p: Instance, d: Instance) -> Answer:
        """D's answer, with the KV from P. Raises GivenUp, or Unreachable for D."""
        route, path, headers = exchange.route, exchange.path, exchange.headers
        # Counted from the decision on: a policy that caps the offloads under way must
        # see this one at once. Counted until P has answered, which may be after D has.
        counted = ExitStack()
        offload = self._loads.offload(
            p.name, route.prompt_tokens, route.new_tokens[p.name]
        )
        counted.enter_context(offload)

        limit_s = route.decision.prefill_timeout_s or self._prefill_timeout_s

        async def prefill(params: dict[str, Any]) -> Answer:
            with counted:
                body = exchange.body.prefill_only(params)
                return await self._prefill(p, path, headers, body, limit_s)

        def decode(params: dict[str, Any]) -> Awaitable[Answer]:
            body = exchange.body.with_transfer(params)
            return self._upstream.ask(d, path, headers, body)

        try:
            return await self._transferred(p, d, prefill, decode)
        except BaseException:
            counted.close()
            raise

    async def _transferred(
        self, p: Instance, d: Instance, prefill: Asking, decode: Asking
    ) -> Answer:
        """D's answer, by the protocol that D's connector has."""
        if d.connector == "nixl":
            prefilled = await prefill({"do_remote_decode": True})
            return await self._handed_over(decode(_params_of(prefilled, p)), d)
        transfer_id = uuid.uuid4().hex
        pull = await self._pull_params(p, transfer_id)
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
            self._give_up(p, Lost(504, p.name, what), what)
        except Failure as error:
            self._give_up(p, error, f"prefill on {p.name}: {error}")
        answer.close()
        if answer.status != 200:
            text = answer.first[:300].decode(errors="replace")
            raise GivenUp(f"prefill on {p.name}: HTTP {answer.status}: {text}")
        return answer

    def _give_up(self, p: Instance, failure: Failure, why: str) -> NoReturn:
        self._engine_ids.pop(p.name, None)
        self._health.failed(failure)
        raise GivenUp(why)

    async def _handed_over(self, decode: Awaitable[Answer], d: Instance) -> Answer:
        limit_s = self._handover_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await decode
        except TimeoutError:
            what = f"no first byte from {d.name} within {limit_s:g} s of the prefill"
            raise GivenUp(what) from None
        except Unreachable:
            raise
        except Failure as error:
            raise GivenUp(str(error)) from None
        if answer.status >= 500:
            answer.close()
            text = answer.first[:300].decode(errors="replace")
            raise GivenUp(f"{d.name}: HTTP {answer.status}: {text}")
        return answer

    async def _pull_params(self, p: Instance, transfer_id: str) -> dict[str, Any]:
        if p.name not in self._engine_ids:
            self._engine_ids[p.name] = await self._engine_id(p)
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": p.bootstrap_url,
            "remote_engine_id": self._engine_ids[p.name],
        }

    async def _engine_id(self, p: Instance) -> str:
        """P's engine id, as its bootstrap server has it."""
        limit_s = self._prefill_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._upstream.engine_id(p)
        except TimeoutError:
            what = f"prefill on {p.name}: {p.bootstrap_url} took over {limit_s:g} s"
            self._give_up(p, Lost(504, p.name, what), what)
        except Failure as error:
            self._give_up(p, error, f"prefill on {p.name}: {error}")


def _params_of(prefilled: Answer, p: Instance) -> dict[str, Any]:
    try:
        params = msgspec.json.decode(prefilled.first, type=_Prefilled)
    except msgspec.DecodeError as error:
        raise GivenUp(f"{p.name}: unreadable answer: {error}") from None
    if params.kv_transfer_params is None:
        raise GivenUp(f"{p.name}: no kv_transfer_params in its answer")
    return params.kv_transfer_params


async def _undo(*tasks: asyncio.Task) -> None:
    """Cancel what runs, and abort what has been answered meanwhile."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Answer):
            result.close()
