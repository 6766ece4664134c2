# SPDX-License-Identifier: Apache-2.0
"""One request to one instance, up to its first token; then its chunks as they come.

What goes wrong before the first token is raised as a Failure with an HTTP status, so
that nobody answers 200 to what has failed.
"""

from __future__ import annotations

import asyncio
import errno
import socket

import msgspec
from multidict import CIMultiDict, MultiMapping

from lab.records.instances import Instance

from .apis import APIS, Api
from .http.client import NoConnection, Pool
from .http.response import BrokenOff, Response

# Below the 5 s after which vLLM closes an idle connection: a request that meets the
# close half-way would fail for no fault of the instance.
KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
_EVENT_END = b"\n\n"
# No answer waits for the end of a first event that is longer.
MAX_FIRST_EVENT_BYTES = 1 << 16
# What keeps the proxy from connecting, and says nothing about the instance.
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
# These are made anew for each hop. A compressed stream could not be counted.
_NOT_SENT_ON = _HOP_BY_HOP | {"host", "content-length", "expect", "accept-encoding"}
# By which vLLM knows the engine that is meant, of several in one server.
_RANK = "X-data-parallel-rank"
_NOT_SENT_BACK = _HOP_BY_HOP | {"content-length"}


class _Rank(msgspec.Struct):
    engine_id: str


class Failure(Exception):
    """No answer: `status` goes to the client; `instance` failed, None if none did."""

    def __init__(self, status: int, instance: str | None, what: str) -> None:
        super().__init__(what)
        self.status = status
        self.instance = instance


class Lost(Failure):
    """The instance went silent or broke off: it may be down, whatever was asked."""


class Unreachable(Lost):
    """No connection, so that nothing has been sent: another instance may be asked."""


class Answer:
    """An answer that has begun: `first` is its first chunk, or all of a short one.

    `lost` is what its instance did not send the rest for.
    """

    def __init__(self, response: Response, first: bytes, name: str) -> None:
        self._response = response
        self._name = name
        self.lost: Lost | None = None
        self.first = first
        self.status = response.status
        self.streams = _streams(response)

    @property
    def headers(self) -> CIMultiDict[str]:
        """Those that go back to the client."""
        return _without(self._response.headers, _NOT_SENT_BACK)

    @property
    def at_end(self) -> bool:
        """Whether it is known that nothing more comes."""
        return self._response.at_end

    async def chunk(self) -> bytes:
        """What came next, b"" at the end. Raises Lost."""
        try:
            return await self._response.chunk()
        except TimeoutError:
            what = "went silent in the middle of its answer"
        except BrokenOff as error:
            what = f"broke off in the middle of its answer: {error}"
        self.lost = Lost(502, self._name, f"{self._name} {what}")
        raise self.lost

    def close(self) -> None:
        """Ends the request: one whose answer is not complete is aborted."""
        self._response.close()


def open_pool(silence_timeout_s: float) -> Pool:
    """Connections in which no request waits for another (asyncio sets TCP_NODELAY)."""
    return Pool(CONNECT_TIMEOUT_S, silence_timeout_s, KEEPALIVE_S)


def sent_on(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """The client's headers, without what concerns its connection only."""
    return _without(headers, _NOT_SENT_ON)


class Upstream:
    """The way to the instances; `pool` as from open_pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def ask(
        self, instance: Instance, path: str, headers: MultiMapping[str], body: bytes
    ) -> Answer:
        """Post to the instance and wait for its first byte. Raises Failure."""
        name = instance.name
        if instance.data_parallel_rank is not None:
            headers = CIMultiDict(headers)
            headers[_RANK] = str(instance.data_parallel_rank)
        try:
            response = await self._pool.request(
                "POST", instance.url, path, headers, body
            )
        except NoConnection as error:
            raise unreachable(name, error) from error
        except TimeoutError as error:
            raise Lost(504, name, f"{name} did not answer in time") from error
        except BrokenOff as error:
            what = f"{name} broke off before its answer: {error}"
            raise Lost(502, name, what) from error
        try:
            return await _begun(response, name, APIS[path])
        except BaseException:
            response.close()
            raise

    async def engine_id(self, instance: Instance) -> str:
        """Its engine id, as its bootstrap server has it. Raises Failure."""
        url = f"{instance.bootstrap_url}/query"
        nothing: CIMultiDict[str] = CIMultiDict()
        try:
            response = await self._pool.request("GET", url, "", nothing)
            ranks = await response.read()
            by_rank = msgspec.json.decode(ranks, type=dict[str, _Rank])
            return by_rank[str(instance.data_parallel_rank or 0)].engine_id
        except OSError as error:
            name = None if is_own(error) else instance.name
            raise Lost(502, name, f"{url}: {_named(error)}") from error
        except (msgspec.DecodeError, KeyError) as error:
            what = f"{url}: no engine id: {error}"
            raise Failure(502, instance.name, what) from None


async def probe(instance: Instance) -> None:
    """Ask for an instance's /health. Raises Failure if that is not good.

    By a connection of its own: one of a dead process proves nothing.
    """
    pool = Pool(PROBE_TIMEOUT_S, PROBE_TIMEOUT_S, keep_s=0)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            nothing: CIMultiDict[str] = CIMultiDict()
            response = await pool.request("GET", instance.url, "/health", nothing)
            response.close()
    except NoConnection as error:
        raise unreachable(instance.name, error) from error
    except OSError as error:
        raise Lost(503, instance.name, f"/health: {_named(error)}") from error
    if response.status >= 400:
        raise Lost(503, instance.name, f"/health: HTTP {response.status}")


def unreachable(name: str, error: OSError) -> Unreachable:
    """No connection to instance `name`, whoever is to blame."""
    what = f"no connection to {name}: {error}"
    return Unreachable(503, None if is_own(error) else name, what)


def is_own(error: OSError) -> bool:
    """Whether no connection could be opened for no fault of the instance.

    The proxy is out of files, ports or memory, or cannot look up the instance's name.
    """
    unknown_name = isinstance(error.__cause__, socket.gaierror)
    return unknown_name or error.errno in _OWN_ERRNOS


async def _begun(response: Response, name: str, api: Api) -> Answer:
    try:
        if not _streams(response):
            return Answer(response, await response.read(), name)
        first, event, whole = await _up_to_token(response, api)
    except TimeoutError as error:
        raise Lost(504, name, f"{name} sent no first byte in time") from error
    except BrokenOff as error:
        what = f"{name} broke off before its first byte: {error}"
        raise Lost(502, name, what) from error
    if not event:
        raise Failure(502, name, f"{name} ended the stream before its first byte")
    kind = api.kind(event)
    if kind == "error":
        said = event.decode(errors="replace")
        raise Failure(502, name, f"{name} answered with an error event: {said}")
    if kind == "end":
        raise Failure(502, name, f"{name} ended the stream without a token")
    if not whole and response.at_end:
        raise Failure(502, name, f"{name} ended the stream in its first event")
    return Answer(response, first, name)


async def _up_to_token(response: Response, api: Api) -> tuple[bytes, bytes, bool]:
    """The first chunks, the first event in them that is no opening, and if it is whole.

    What that event is decides the status, so all of it must be here. Only the stream's
    end, or MAX_FIRST_EVENT_BYTES, leave less of it. A chat begins with an opening for
    each choice, naming the role. vLLM writes them also where no token follows.
    """
    first, start, end = b"", 0, -1
    while end < 0 and len(first) < MAX_FIRST_EVENT_BYTES:
        more = await response.chunk()
        if not more:
            break
        first += more
        end = first.find(_EVENT_END, start)
        while end >= 0 and api.kind(first[start:end]) == "opening":
            start = end + len(_EVENT_END)
            end = first.find(_EVENT_END, start)
    return first, first[start:] if end < 0 else first[start:end], end >= 0


def _streams(response: Response) -> bool:
    kind = response.headers.get("Content-Type", "").lower()
    return response.status == 200 and kind.startswith("text/event-stream")


def _without(headers: MultiMapping[str], names: frozenset[str]) -> CIMultiDict[str]:
    """The headers without `names` and without those that `Connection` names."""
    if listed := headers.getall("Connection", None):
        names |= {name.strip().lower() for name in ",".join(listed).split(",")}
    return CIMultiDict([one for one in headers.items() if one[0].lower() not in names])


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
