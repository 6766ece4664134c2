# SPDX-License-Identifier: Apache-2.0
"""The control surface: health, state and decisions, for operators only.

It has an address of its own, which only this machine can reach: decisions name
sessions, and the rest names instances.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvtax_fleet.proxy.breakdown import breakdown_of
from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import Failure
from kvtax_fleet.proxy.http_server import error_response, json_response


class Control:
    """Answers to operators."""

    def __init__(self, core: Core[bytes], decisions: DecisionLog) -> None:
        self._core = core
        self._decisions = decisions

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a GET request."""
        handles = {
            "/health": self._health,
            "/breakdown": self._breakdown,
            "/decisions": self._last_decisions,
        }
        handle = handles.get(request.path)
        if handle is None:
            return error_response(Failure(404, None, "not served here"))
        if request.method not in ("GET", "HEAD"):
            return error_response(Failure(405, None, "served for GET only"))
        return handle(request)

    def _health(self, request: web.BaseRequest) -> web.Response:
        """Answer 200 while an instance is healthy, else 503."""
        out = self._core.health.out
        healthy = [name for name in self._core.instances if name not in out]
        body = msgspec.json.encode({"healthy": healthy, "out": sorted(out)})
        return json_response(200 if healthy else 503, body)

    def _breakdown(self, request: web.BaseRequest) -> web.Response:
        return json_response(200, msgspec.json.encode(breakdown_of(self._core, {})))

    def _last_decisions(self, request: web.BaseRequest) -> web.Response:
        """Answer with the last `n` decisions, one a line as in the log, newest last."""
        text = request.rel_url.query.get("n", "100")
        if not text.isdecimal():
            return error_response(Failure(400, None, "n is no number of decisions"))
        lines = list(self._decisions.recent)
        body = b"\n".join(lines[max(0, len(lines) - int(text)) :])
        return web.Response(body=body, content_type="application/jsonl")
