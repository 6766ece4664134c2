# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the proxy: what was asked, where, and how it ended."""

from __future__ import annotations

from lab.records.decisions import DecisionEnd

from .body import Body
from .client import Client
from .loads import Flight
from .router import Route
from .upstream import sent_on


class Exchange:
    """`end` is the request's last line in the decision log, filled in on the way.

    `body` is there once `read_body` has been awaited. `cached_tokens` is what each
    instance has of the prompt, None where that is not known. `route` and `flight` are
    there once an instance has been chosen; a second attempt replaces them.
    """

    __slots__ = (
        "body",
        "cached_tokens",
        "client",
        "end",
        "flight",
        "headers",
        "route",
    )
    body: Body
    route: Route
    flight: Flight

    def __init__(self, client: Client, number: int) -> None:
        self.client = client
        self.headers = sent_on(client.headers)
        self.cached_tokens: list[int] | None = None
        self.end = DecisionEnd(
            id=client.headers.get("X-Request-Id") or f"kvtax/{number}",
            number=number,
            session=client.headers.get("X-Session-Id"),
        )

    @property
    def path(self) -> str:
        return self.client.path

    async def read_body(self) -> None:
        """Raises Failure if it is too large or no JSON object."""
        self.body = await self.client.body()
        if self.end.session is None:
            self.end.session = self.body.session
