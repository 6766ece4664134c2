# SPDX-License-Identifier: Apache-2.0
"""HTTP to our own servers, past the proxy that the host's environment names."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import cast

from kvtax.proc.ports import LOOPBACK

HOSTS = (LOOPBACK, "localhost", "::1")
# What programs read; Python prefers the first, Go the second.
NAMES = ("no_proxy", "NO_PROXY")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_url(url: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Open a URL without any proxy. Raises OSError and ValueError."""
    return cast(HTTPResponse, _DIRECT.open(url, timeout=timeout_s))


def without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep a process from reaching loopback by a proxy.

    vLLM's connectors ask their own servers by HTTP, too.
    """
    exempt = next(filter(None, map(env.get, NAMES)), "")
    if exempt.strip() != "*":
        named = [host.strip() for host in exempt.split(",") if host.strip()]
        exempt = ",".join([*named, *(host for host in HOSTS if host not in named)])
    return dict.fromkeys(NAMES, exempt)
