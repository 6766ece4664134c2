# SPDX-License-Identifier: Apache-2.0
"""Requests to instances over HTTP: an answer up to its first token, then its chunks.

An error before the first token is raised as a Failure with an HTTP status, so that no
failed request is answered with 200.
"""

from __future__ import annotations

import asyncio
import errno
import io
import re
from typing import Self

import aiohttp
import msgspec
from aiohttp.resolver import ThreadedResolver
from multidict import CIMultiDict, MultiMapping
from yarl import URL

from kvtax_fleet.proxy.apis import (
    EVENT_ENDS,
    UNREADABLE,
    is_result,
    kind_of,
    with_lf,
)
from kvtax_fleet.proxy.exchange import Failure, Lost, Silent, Unreachable
from kvtax_fleet.records.exposition import Gauges
from kvtax_fleet.records.instances import Instance

# Seconds, below the 5 after which vLLM closes an idle connection: a request that meets
# the close half-way would fail for no fault of the instance.
KEEPALIVE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
# Seconds for a page of an instance, whose server may be busy with long prompts.
PAGE_TIMEOUT_S = 10.0
# Seconds for which an instance's address is kept.
ADDRESS_S = 2
# Bytes of an answer that are read ahead of the client.
READ_BYTES = 1 << 16
# Bytes of a body above which it is sent in pieces.
PIECES_BYTES = 1 << 20
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
# Made anew for each hop. A compressed stream could not be counted; a compressed body
# has been read.
_NOT_FORWARDED = _HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "expect",
    "accept-encoding",
    "x-data-parallel-rank",
}
# Added by aiohttp unless they are listed.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# The metrics by which policies go.
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_GAUGE = re.compile(rf"^vllm:({'|'.join(_GAUGES)})(?:\{{.*\}})? (\S+)", re.MULTILINE)
# Selects one of several engines of a vLLM server.
_RANK = "X-data-parallel-rank"


class _Rank(msgspec.Struct):
    engine_id: str


class HttpAnswer:
    """An Answer over HTTP."""

    def __init__(
        self, response: aiohttp.ClientResponse, name: str, silence_timeout_s: float
    ) -> None:
        self._response = response
        self._name = name
        self._silence_timeout_s = silence_timeout_s
        self.first = b""
        self.status = response.status
        kind = response.headers.get("Content-Type", "").lower()
        self.streams = self.status == 200 and kind.startswith("text/event-stream")
        self.good = self.streams

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers, with the length of an answer that is no stream."""
        left_out = _HOP_BY_HOP | ({"content-length"} if self.streams else set())
        return _without(self._response.headers, left_out)

    @property
    def at_end(self) -> bool:
        return self._response.content.at_eof()

    async def chunk(self) -> bytes:
        name = self._name
        try:
            async with asyncio.timeout(self._silence_timeout_s):
                return await self._response.content.readany()
        except TimeoutError:
            why = f"{name} went silent in the middle of its answer"
            raise Silent(502, name, why) from None
        except (aiohttp.ClientError, OSError) as error:
            why = f"{name} broke off in the middle of its answer: {error}"
            raise Lost(502, name, why) from error

    def close(self) -> None:
        self._response.close()

    async def begin(self) -> None:
        """Read up to the first token, or all of an answer that is no stream.

        Raises Failure.
        """
        name = self._name
        if not self.streams:
            while chunk := await self.chunk():
                self.first += chunk
            self.good = 200 <= self.status < 300 and is_result(self.first)
            return
        try:
            async with asyncio.timeout(self._silence_timeout_s):
                event, is_whole = await self._up_to_token()
        except TimeoutError as error:
            raise Silent(504, name, f"{name} sent no first byte in time") from error
        except (aiohttp.ClientError, OSError) as error:
            why = f"{name} broke off before its first byte: {error}"
            raise Lost(502, name, why) from error
        if not event:
            raise Failure(502, name, f"{name} ended the stream before its first byte")
        if not is_whole:
            if self.at_end:
                raise Failure(502, name, f"{name} ended the stream in its first event")
            return
        kind = kind_of(event)
        if kind == "error":
            text = event.decode(errors="replace")
            raise Failure(502, name, f"{name} answered with an error event", text)
        if kind == "end":
            raise Failure(502, name, f"{name} ended the stream without a token")

    async def _up_to_token(self) -> tuple[bytes, bool]:
        """Read the first chunks, up to the first event in them that is no opening.

        Returns the event, and whether it is whole. The event decides the status, so all
        of it must be here; only the stream's end, or MAX_FIRST_EVENT_BYTES, leave less
        of it. A chat begins with an opening for each choice, naming the role; vLLM
        writes openings also where no token follows.
        """
        first, start, end = b"", 0, None
        while end is None and len(first) - start < MAX_FIRST_EVENT_BYTES:
            more = await self._response.content.readany()
            if not more:
                break
            first += more
            end = _EVENT_END.search(first, start)
            while end and kind_of(with_lf(first[start : end.start()])) == "opening":
                start = end.end()
                end = _EVENT_END.search(first, start)
        self.first = first
        event = first[start : end.start() if end else None]
        return with_lf(event), end is not None


class HttpUpstream:
    """An Upstream over HTTP, to be entered."""

    def __init__(self, silence_timeout_s: float) -> None:
        self._silence_timeout_s = silence_timeout_s

    async def __aenter__(self) -> Self:
        self._session = _session(
            aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            keepalive_timeout=KEEPALIVE_S,
            ttl_dns_cache=ADDRESS_S,
        )
        # An open connection to a dead process would prove nothing.
        self._probes = _session(
            aiohttp.ClientTimeout(total=PAGE_TIMEOUT_S),
            force_close=True,
            use_dns_cache=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._probes.close()

    async def request(
        self,
        instance: Instance,
        path: str,
        headers: MultiMapping[str],
        payload: bytes,
        streams: bool,
    ) -> HttpAnswer:
        """Send a request; return its answer up to its first token. Raises Failure."""
        answer = await self._open(instance, path, headers, payload, streams)
        try:
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        return answer

    async def models(
        self, instance: Instance, headers: MultiMapping[str]
    ) -> tuple[int, bytes]:
        """Return the status and text of an instance's /v1/models. Raises Lost."""
        url = f"{instance.url}/v1/models"
        try:
            async with self._probes.get(url, headers=headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(502, instance.name, f"{url}: {_named(error)}") from error

    async def _open(
        self,
        instance: Instance,
        path: str,
        headers: MultiMapping[str],
        body: bytes,
        streams: bool,
    ) -> HttpAnswer:
        """Send a request and wait for the head of its answer. Raises Failure.

        An answer that does not stream has its head when all of it has been computed, so
        only one that `streams` has a limit.
        """
        name = instance.name
        if instance.data_parallel_rank is not None:
            headers = CIMultiDict(headers)
            headers[_RANK] = str(instance.data_parallel_rank)
        try:
            async with asyncio.timeout(self._silence_timeout_s if streams else None):
                response = await self._session.request(
                    "POST",
                    URL(instance.url + path, encoded=True),
                    headers=headers,
                    data=io.BytesIO(body) if len(body) > PIECES_BYTES else body or None,
                    allow_redirects=False,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _unreachable(instance, error) from error
        except TimeoutError as error:
            raise Silent(504, name, f"{name} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            why = f"{name} broke off before its answer: {error}"
            raise Lost(502, name, why) from error
        except ValueError as error:
            # Its text may quote a header.
            why = f"the request cannot be sent: {type(error).__name__}"
            raise Failure(400, None, why) from None
        return HttpAnswer(response, name, self._silence_timeout_s)

    async def engine_id(self, instance: Instance) -> str:
        url = f"{instance.bootstrap_url}/query"
        try:
            async with self._session.get(url) as response:
                ranks = await response.read()
            by_rank = msgspec.json.decode(ranks, type=dict[str, _Rank])
            return by_rank[str(instance.data_parallel_rank or 0)].engine_id
        except (aiohttp.ClientError, OSError) as error:
            raise Failure(502, instance.name, f"{url}: {_named(error)}") from error
        except (msgspec.DecodeError, RecursionError, KeyError) as error:
            why = f"{url}: no engine id: {error}"
            raise Failure(502, instance.name, why) from None

    async def gauges(self, instance: Instance) -> Gauges:
        url = f"{instance.url}/metrics"
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                async with self._session.get(url) as response:
                    text = await response.text()
            values = {name: float(value) for name, value in _GAUGE.findall(text)}
            running, waiting, usage = (values[name] for name in _GAUGES)
        except (TimeoutError, aiohttp.ClientError, OSError, *UNREADABLE) as error:
            raise Lost(502, instance.name, f"{url}: {_named(error)}") from error
        except KeyError as error:
            raise Failure(
                502, instance.name, f"{url}: no vllm:{error.args[0]}"
            ) from None
        return Gauges(int(running), int(waiting), usage)

    async def probe(self, instance: Instance) -> None:
        """Request an instance's /health. Raises Failure if that is not good."""
        try:
            async with self._probes.get(f"{instance.url}/health") as response:
                status = response.status
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(instance, error) from error
        except TimeoutError as error:
            why = f"/health: no answer within {PAGE_TIMEOUT_S:g} s"
            raise Silent(503, instance.name, why) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(503, instance.name, f"/health: {_named(error)}") from error
        if status >= 400:
            raise Lost(503, instance.name, f"/health: HTTP {status}")


def _unreachable(instance: Instance, error: OSError) -> Unreachable:
    cause = getattr(error, "os_error", error)
    name = None if _is_own(error) else instance.name
    return Unreachable(503, name, f"no connection to {instance.name}: {cause}")


def _is_own(error: Exception) -> bool:
    """Return whether the proxy is out of files or ports."""
    cause = getattr(error, "os_error", error)
    return isinstance(cause, OSError) and cause.errno in _OWN_ERRNOS


def forwarded(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Return the client's headers, without those of its own connection."""
    return _without(headers, _NOT_FORWARDED)


def _session(
    timeout: aiohttp.ClientTimeout, **connector: object
) -> aiohttp.ClientSession:
    """Open a session in which no request waits for another's connection."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            resolver=ThreadedResolver(),
            **connector,  # type: ignore[arg-type]
        ),
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NOT_ADDED,
        read_bufsize=READ_BYTES,
    )


def _without(headers: MultiMapping[str], names: frozenset[str]) -> CIMultiDict[str]:
    """Remove `names` and the headers that `Connection` names."""
    if listed := headers.getall("Connection", None):
        names |= {name.strip().lower() for name in ",".join(listed).split(",")}
    return CIMultiDict(
        [(name, text) for name, text in headers.items() if name.lower() not in names]
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
