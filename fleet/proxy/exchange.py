# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the proxy: what was asked, where, and how it ended."""

from __future__ import annotations

from aiohttp import web

from lab.records.decisions import DecisionEnd

from .body import Body, BodyError
from .loads import Flight
from .router import Route
from .upstream import Failure, sent_on

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Exchange:
    """`end` is the request's last line in the decision log, filled in on the way.

    `body` is there once `read_body` has been awaited. `route` and `flight` are there
    once an instance has been chosen; a second attempt replaces them.
    """

    __slots__ = ("body", "end", "flight", "headers", "request", "route")
    body: Body
    route: Route
    flight: Flight

    def __init__(self, request: web.Request, number: int) -> None:
        self.request = request
        self.headers = sent_on(request.headers)
        self.end = DecisionEnd(
            id=request.headers.get("X-Request-Id") or f"kvtax/{number}",
            number=number,
            session=request.headers.get("X-Session-Id"),
        )

    @property
    def path(self) -> str:
        return self.request.path

    async def read_body(self) -> None:
        """Raises Failure if it is too large or no JSON object."""
        try:
            self.body = Body(await self.request.read(), self.path == CHAT)
        except web.HTTPRequestEntityTooLarge as error:
            raise Failure(413, None, f"the body is too large: {error.text}") from None
        except BodyError as error:
            raise Failure(400, None, str(error)) from None
