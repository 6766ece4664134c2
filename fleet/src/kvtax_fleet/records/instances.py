# SPDX-License-Identifier: Apache-2.0
"""instances.json: the instances of a fleet, in a fixed order.

The launcher writes it, the proxy reads it, and a user may write one for servers that
run already: unknown fields are refused.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

Role = Literal["both", "prefill", "decode"]
ConnectorKind = Literal["noop", "mooncake", "nixl", "direct_read"]


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server, or one engine of it, as the proxy needs to know it."""

    name: str
    """Unlike that of all others."""
    url: str
    """Root of its HTTP API; only engines of one server have the same."""
    role: Role = "both"
    """What the instance is for."""
    connector: ConnectorKind | None = None
    """The kind of transfer that the instance can take part in; null: plain vLLM."""
    bootstrap_url: str | None = None
    """Mooncake's bootstrap server; null where there is none."""
    block_tokens: Annotated[int, Meta(ge=1)] = 16
    """Tokens per KV cache block."""
    kv_tokens: Annotated[int, Meta(ge=1)] | None = None
    """How many tokens of KV it can hold; null: not known, so no policy goes by it."""
    data_parallel_rank: Annotated[int, Meta(ge=0)] | None = None
    """Which engine of its server it is, from 0; null: the server has no others."""


def unusable(url: str) -> str | None:
    """Return why no request can be sent to an http URL, None if one can.

    The name of an instance is shown to clients, so a URL may have no secret.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as a look-up does: labels have 1 to 63 letters
    except ValueError as error:  # UnicodeError is one, too
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "no http URL"
    if "@" in parts.netloc:
        return "a user or password stands in it, which is no address; remove it"
    if (
        not host
        or port == 0
        or any(not sign.isprintable() or sign == " " for sign in url)
    ):
        return "no host and port; http://HOST:PORT expected"
    return None


class InstancesFile(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="schema",
    tag="kvtax.instances/1",
):
    """The instances of a fleet."""

    instances: list[Instance]
    """At least one."""

    def __post_init__(self) -> None:
        if not self.instances:
            raise ValueError("`instances` is empty")
        names = Counter(instance.name for instance in self.instances)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two instances have the name {twice[0]!r}")
        ranks: dict[str, list[int | None]] = defaultdict(list)
        for instance in self.instances:
            ranks[instance.url].append(instance.data_parallel_rank)
        for url, engines in ranks.items():
            several = len(engines) > 1
            if several and (None in engines or len({*engines}) < len(engines)):
                raise ValueError(
                    f"two instances have the url {url!r}, and not each a "
                    "`data_parallel_rank` of its own"
                )
        for instance in self.instances:
            for url in filter(None, (instance.url, instance.bootstrap_url)):
                if why := unusable(url):
                    named = f"{_redacted(instance.name)}: {_redacted(url)!r}"
                    raise ValueError(f"{named}: {why}")


def _redacted(text: str) -> str:
    """Replace the user and password of a URL."""
    return re.sub(r"(^|//)[^/]*@", r"\1***@", text)
