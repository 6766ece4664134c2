# SPDX-License-Identifier: Apache-2.0
"""One request to one instance: its answer up to the first token, then its chunks.

An error before the first token is raised as a Failure with an HTTP status, so that no
failed request is answered with 200.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from contextlib import closing
from typing import Any, Protocol, TypeVar

import msgspec
from multidict import CIMultiDict, MultiMapping

from kvtax_fleet.records.instances import Instance

from .apis import APIS, EVENT_ENDS, UNREADABLE, Api, with_lf
from .http_client import BrokenOff, NoConnection, Pool, Response

# Seconds, below the 5 after which vLLM closes an idle connection: a request that meets
# the close half-way would fail for no fault of the instance.
KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
_EVENT_END = re.compile(b"|".join(EVENT_ENDS))
# Bytes of a first event whose end is waited for.
MAX_FIRST_EVENT_BYTES = 1 << 16
# Errors of the proxy's own, which are no failure of the instance.
_OWN_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS}
# These headers belong to a connection, not to what it carries (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Made anew for each hop. A compressed stream could not be counted.
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "content-length", "expect", "accept-encoding"}
# Selects one of several engines of a vLLM server.
_RANK = "X-data-parallel-rank"
_NOT_SENT_BACK = _HOP_BY_HOP | {"content-length"}


# By name, as /v1/models has them.
Models = dict[str, dict[str, Any]]


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class _Rank(msgspec.Struct):
    engine_id: str


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


class UnknownModel(Failure):
    """No instance serves the model. Its name is the client's, and in no log."""

    def __init__(self, model: str) -> None:
        super().__init__(404, None, "no instance serves the model", model)


class Lost(Failure):
    """The instance went silent or broke off: it may be down."""


class Unreachable(Lost):
    """No connection, so that nothing has been sent: another instance may be tried."""


class Answer(Protocol):
    """An answer that has begun.

    `first`: its first chunk, or all of an answer that is no stream (`streams`). `lost`:
    why the rest did not come.
    """

    status: int
    first: bytes
    streams: bool
    lost: Lost | None

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
    ) -> Answer:
        """Send a request to the instance, wait for its first byte. Raises Failure."""

    async def engine_id(self, instance: Instance) -> str:
        """Read the engine's id from its bootstrap server. Raises Failure."""


class HttpAnswer:
    """An Answer over HTTP."""

    def __init__(self, response: Response, first: bytes, name: str) -> None:
        self._response = response
        self._name = name
        self.lost: Lost | None = None
        self.first = first
        self.status = response.status
        self.streams = _streams(response)

    @property
    def headers(self) -> CIMultiDict[str]:
        return sent_back(self._response.headers)

    @property
    def at_end(self) -> bool:
        return self._response.at_end

    async def chunk(self) -> bytes:
        try:
            return await self._response.chunk()
        except TimeoutError:
            why = "went silent in the middle of its answer"
        except BrokenOff as error:
            why = f"broke off in the middle of its answer: {error}"
        self.lost = Lost(502, self._name, f"{self._name} {why}")
        raise self.lost

    def close(self) -> None:
        self._response.close()


def open_pool(silence_timeout_s: float) -> Pool:
    """Open connections in which no request waits for another."""
    return Pool(CONNECT_TIMEOUT_S, silence_timeout_s, KEEPALIVE_S)


def forwarded(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Return the client's headers, without those of its own connection."""
    return _without(headers, _NOT_FORWARDED)


def sent_back(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Return the instance's headers, without those of its own connection."""
    return _without(headers, _NOT_SENT_BACK)


class HttpUpstream:
    """An Upstream over HTTP; `pool` as from open_pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def request(
        self, instance: Instance, path: str, headers: MultiMapping[str], payload: bytes
    ) -> Answer:
        name = instance.name
        if instance.data_parallel_rank is not None:
            headers = CIMultiDict(headers)
            headers[_RANK] = str(instance.data_parallel_rank)
        try:
            response = await self._pool.request(
                "POST", instance.url, path, headers, payload
            )
        except NoConnection as error:
            raise unreachable(name, error) from error
        except TimeoutError as error:
            raise Lost(504, name, f"{name} did not answer in time") from error
        except BrokenOff as error:
            why = f"{name} broke off before its answer: {error}"
            raise Lost(502, name, why) from error
        try:
            return await _begun(response, name, APIS[path])
        except BaseException:
            response.close()
            raise

    async def engine_id(self, instance: Instance) -> str:
        url = f"{instance.bootstrap_url}/query"
        no_headers: CIMultiDict[str] = CIMultiDict()
        try:
            response = await self._pool.request("GET", url, "", no_headers)
            ranks = await response.read()
            by_rank = msgspec.json.decode(ranks, type=dict[str, _Rank])
            return by_rank[str(instance.data_parallel_rank or 0)].engine_id
        except OSError as error:
            name = None if is_own(error) else instance.name
            raise Lost(502, name, f"{url}: {_named(error)}") from error
        except (msgspec.DecodeError, KeyError) as error:
            why = f"{url}: no engine id: {error}"
            raise Failure(502, instance.name, why) from None


async def probe(instance: Instance) -> None:
    """Request an instance's /health. Raises Failure if that is not good."""
    try:
        status, _ = await _read(instance, "/health")
    except NoConnection as error:
        raise unreachable(instance.name, error) from error
    except OSError as error:
        raise Lost(503, instance.name, f"/health: {_named(error)}") from error
    if status >= 400:
        raise Lost(503, instance.name, f"/health: HTTP {status}")


async def list_models(instance: Instance) -> Models | None:
    """Read an instance's models, None if it does not list them to the proxy."""
    try:
        _, text = await _read(instance, "/v1/models")
        listed = msgspec.json.decode(text, type=_ModelList).data
        return {str(model["id"]): model for model in listed}
    except (OSError, *UNREADABLE, KeyError):
        return None


async def _read(instance: Instance, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET request. Raises OSError.

    Uses a new connection: an open one to a dead process proves nothing.
    """
    no_headers: CIMultiDict[str] = CIMultiDict()
    with closing(Pool(PROBE_TIMEOUT_S, PROBE_TIMEOUT_S, keep_s=0)) as pool:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            response = await pool.request("GET", instance.url, path, no_headers)
            return response.status, await response.read()


def unreachable(name: str, error: OSError) -> Unreachable:
    """Return the failure to connect to instance `name`, whoever is to blame."""
    message = f"no connection to {name}: {error}"
    return Unreachable(503, None if is_own(error) else name, message)


def is_own(error: OSError) -> bool:
    """Return whether no connection could be opened for no fault of the instance.

    The proxy may be out of files, ports or memory, or not find the instance's name.
    """
    unknown_name = isinstance(error.__cause__, socket.gaierror)
    return unknown_name or error.errno in _OWN_ERRNOS


async def _begun(response: Response, name: str, api: Api) -> Answer:
    try:
        if not _streams(response):
            return HttpAnswer(response, await response.read(), name)
        first, event, whole = await _up_to_token(response, api)
    except TimeoutError as error:
        raise Lost(504, name, f"{name} sent no first byte in time") from error
    except BrokenOff as error:
        why = f"{name} broke off before its first byte: {error}"
        raise Lost(502, name, why) from error
    if not event:
        raise Failure(502, name, f"{name} ended the stream before its first byte")
    kind = api.kind(event)
    if kind == "error":
        text = event.decode(errors="replace")
        raise Failure(502, name, f"{name} answered with an error event", text)
    if kind == "end":
        raise Failure(502, name, f"{name} ended the stream without a token")
    if not whole and response.at_end:
        raise Failure(502, name, f"{name} ended the stream in its first event")
    return HttpAnswer(response, first, name)


async def _up_to_token(response: Response, api: Api) -> tuple[bytes, bytes, bool]:
    """Read the first chunks, up to the first event in them that is no opening.

    Returns the chunks, the event, and whether it is whole. The event decides the
    status, so all of it must be here; only the stream's end, or MAX_FIRST_EVENT_BYTES,
    leave less of it. A chat begins with an opening for each choice, naming the role;
    vLLM writes openings also where no token follows.
    """
    first, start, end = b"", 0, None
    while end is None and len(first) < MAX_FIRST_EVENT_BYTES:
        more = await response.chunk()
        if not more:
            break
        first += more
        end = _EVENT_END.search(first, start)
        while end and api.kind(with_lf(first[start : end.start()])) == "opening":
            start = end.end()
            end = _EVENT_END.search(first, start)
    event = first[start : end.start() if end else None]
    return first, with_lf(event), end is not None


def _streams(response: Response) -> bool:
    kind = response.headers.get("Content-Type", "").lower()
    return response.status == 200 and kind.startswith("text/event-stream")


def _without(headers: MultiMapping[str], names: frozenset[str]) -> CIMultiDict[str]:
    """Remove `names` and the headers that `Connection` names."""
    if listed := headers.getall("Connection", None):
        names |= {name.strip().lower() for name in ",".join(listed).split(",")}
    return CIMultiDict(
        [(name, text) for name, text in headers.items() if name.lower() not in names]
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
