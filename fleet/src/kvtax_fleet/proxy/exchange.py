# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the proxy, with its client and its instances' answers.

The protocols are all that the rest of the proxy knows of both sides: over HTTP, or in
virtual time."""

from __future__ import annotations

from hashlib import sha256
from typing import Generic, Protocol, TypeVar

import msgspec
from multidict import CIMultiDict, MultiMapping

from kvtax_fleet.proxy.body import Payload, RequestBody
from kvtax_fleet.proxy.loads import Flight
from kvtax_fleet.proxy.router import Route
from kvtax_fleet.records.decisions import DecisionEnd
from kvtax_fleet.records.exposition import Gauges
from kvtax_fleet.records.instances import Instance


class Failure(Exception):
    """No answer: `status` goes to the client; `instance` failed, None if none did.

    `quoted` goes to the client with the message, and into no log: it may have text of
    the prompt.
    """

    def __init__(
        self, status: int, instance: str | None, message: str, quoted: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.instance = instance
        self.quoted = quoted


class Lost(Failure):
    """The instance broke off: it may be down."""


class Silent(Lost):
    """The instance sent nothing for too long: down, unless others hear from it."""


class Unreachable(Lost):
    """No connection, so that nothing has been sent."""


def error_json(error: Failure) -> bytes:
    """Encode an error as OpenAI's APIs do, with the instance that failed."""
    message = f"{error}: {error.quoted}" if error.quoted else str(error)
    more = {"param": None, "code": error.status, "instance": error.instance}
    fields = {"message": message, "type": "proxy_error", **more}
    return msgspec.json.encode({"error": fields})


def error_event(error: Failure) -> bytes:
    """Encode an error inside a stream."""
    return b"data: " + error_json(error) + b"\n\n"


# Characters of a request's or a session's name, above which its hash stands for it.
MAX_NAME_CHARS = 256


class Client(Protocol[Payload]):
    """The sender of a request. Sending raises ConnectionResetError if it is gone.

    `headers`: those to send on.
    """

    @property
    def path(self) -> str:
        """The path of the API."""

    @property
    def headers(self) -> MultiMapping[str]:
        """The request's headers, without those of its connection."""

    async def body(self) -> RequestBody[Payload]:
        """Read the body. Raises Failure if it is too large or no JSON object."""

    def refuse(self, failure: Failure) -> None:
        """Answer with an error; an answer that has begun is broken off."""

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin the answer."""

    async def write(self, chunk: bytes) -> None:
        """Send the next chunk, as fast as the client takes it."""

    async def end(self, chunk: bytes = b"") -> None:
        """Send the last chunk."""

    async def break_off(self, failure: Failure) -> None:
        """Send an error event in place of a stream's rest; `end` follows."""


class Answer(Protocol):
    """An answer that has begun.

    `first`: its first chunk; all of it, if it is no stream. `streams`: it is a stream
    of events. `good`: it has a result.
    """

    status: int
    first: bytes
    streams: bool
    good: bool

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers that go back to the client."""

    @property
    def at_end(self) -> bool:
        """True if the answer is complete."""

    async def chunk(self) -> bytes:
        """Return the next chunk, b"" at the end. Raises Lost."""

    def close(self) -> None:
        """End the request: one whose answer is not complete is aborted."""


Payload_contra = TypeVar("Payload_contra", contravariant=True)


class Upstream(Protocol[Payload_contra]):
    """The way to the instances."""

    async def request(
        self,
        instance: Instance,
        path: str,
        headers: MultiMapping[str],
        payload: Payload_contra,
        streams: bool,
    ) -> Answer:
        """Send a request and wait for the first byte of its answer. Raises Failure.

        One that `streams` has a limit for its first byte.
        """

    async def engine_id(self, instance: Instance) -> str:
        """Read the engine's id from its bootstrap server. Raises Failure."""

    async def gauges(self, instance: Instance) -> Gauges:
        """Read the instance's metrics. Raises Failure."""


class Exact(Protocol[Payload]):
    """A source of the exact cache state."""

    async def cached_tokens(self, body: RequestBody[Payload]) -> dict[str, int] | None:
        """Return the tokens of the prompt's longest cached prefix for each instance.

        None where they are unknown. At most all but the last token: vLLM computes at
        least one.
        """


class Exchange(Generic[Payload]):
    """A request from its arrival to its end.

    `end`: its last line in the decision log, filled in on the way. `body`: there after
    `read_body`. `cached_tokens`: tokens of the prompt that each instance has cached,
    None where unknown. `route`, `flight`: there once an instance has been chosen; a
    second attempt replaces them.
    """

    body: RequestBody[Payload]
    route: Route
    flight: Flight

    def __init__(self, client: Client[Payload], number: int) -> None:
        self.client = client
        self.cached_tokens: dict[str, int] | None = None
        self.end = DecisionEnd(
            id=_bounded(client.headers.get("X-Request-Id")) or f"kvtax/{number}",
            number=number,
            session=_bounded(client.headers.get("X-Session-Id")),
        )

    @property
    def path(self) -> str:
        return self.client.path

    async def read_body(self) -> None:
        """Read the body. Raises Failure if it is too large or no JSON object."""
        self.body = await self.client.body()


def _bounded(name: str | None) -> str | None:
    """Return the name that a client gave, or its hash if it is long.

    Names are kept: by pins, the last decisions and the log.
    """
    if name is None or len(name) <= MAX_NAME_CHARS:
        return name
    return f"sha256:{sha256(name.encode(errors='surrogatepass')).hexdigest()}"
