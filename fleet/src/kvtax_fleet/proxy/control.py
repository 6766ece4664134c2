# SPDX-License-Identifier: Apache-2.0
"""The control surface: health, metrics and decisions, for operators only.

It has an address of its own, which only this machine can reach: decisions name
sessions, and the rest names instances.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import Failure
from kvtax_fleet.proxy.http_server import error_response, json_response
from kvtax_fleet.proxy.kvindexd import Kvindexd, State
from kvtax_fleet.proxy.metrics import Metrics


class Control:
    """Answers to operators."""

    def __init__(
        self, core: Core[bytes], decisions: DecisionLog, exact: Kvindexd | None
    ) -> None:
        self._core = core
        self._decisions = decisions
        self._exact = exact
        self._metrics = Metrics(core, exact)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a GET request."""
        handles = {
            "/health": self._get_health,
            "/metrics": self._get_metrics,
            "/breakdown": self._get_breakdown,
            "/decisions": self._get_decisions,
        }
        path = request.path
        if path not in handles:
            return error_response(Failure(404, None, f"{path}: not served here"), path)
        if request.method not in ("GET", "HEAD"):
            failure = Failure(405, None, f"{path}: served for GET only")
            return error_response(failure, path)
        return await handles[path](request)

    async def _states(self) -> dict[str, State]:
        return {} if self._exact is None else await self._exact.states()

    async def _get_health(self, request: web.BaseRequest) -> web.Response:
        """Answer 200 while an instance is healthy, else 503."""
        ejected = self._core.health.ejected
        healthy = [name for name in self._core.instances if name not in ejected]
        body = msgspec.json.encode({"healthy": healthy, "ejected": sorted(ejected)})
        return json_response(200 if healthy else 503, body)

    async def _get_metrics(self, request: web.BaseRequest) -> web.Response:
        text = self._metrics.prometheus(await self._states())
        kind = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=text, headers=kind)

    async def _get_breakdown(self, request: web.BaseRequest) -> web.Response:
        breakdown = self._metrics.breakdown(await self._states())
        return json_response(200, msgspec.json.encode(breakdown))

    async def _get_decisions(self, request: web.BaseRequest) -> web.Response:
        """Answer with the last `n` decisions, one a line as in the log, newest last."""
        text = request.rel_url.query.get("n", "100")
        if not text.isdecimal():
            failure = Failure(400, None, f"n={text!r} is no number of decisions")
            return error_response(failure, request.path)
        lines = list(self._decisions.recent)
        body = b"\n".join(lines[max(0, len(lines) - int(text)) :])
        return web.Response(body=body, content_type="application/jsonl")
