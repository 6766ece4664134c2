# SPDX-License-Identifier: Apache-2.0
"""Are these instances there, and what the instances file says they are?"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from lab.records.exposition import cache_config
from lab.records.instances import Instance

TIMEOUT_S = 10.0


class CheckError(Exception):
    """An instance is not in order; the message says which and how."""


def check_instances(instances: list[Instance]) -> None:
    """Raises CheckError with everything that is wrong, a line each."""
    wrong = [complaint for each in instances for complaint in _complaints(each)]
    if wrong:
        raise CheckError("\n".join(wrong))


def _complaints(instance: Instance) -> list[str]:
    try:
        http_text(f"{instance.url}/health")
        told = cache_config(http_text(f"{instance.url}/metrics"))
    except CheckError as error:
        return [f"{instance.name}: {error}"]
    wrong = []
    found = told.get("block_size", instance.block_tokens)
    if found != instance.block_tokens:
        wrong.append(
            f"{instance.name}: blocks have {found} tokens, "
            f"not {instance.block_tokens} (block_tokens)"
        )
    if instance.bootstrap_url:
        parts = urlsplit(instance.bootstrap_url)
        wrong += _unreachable(instance, "bootstrap_url", parts.hostname, parts.port)
    if side := instance.direct_read:
        wrong += _unreachable(instance, "direct_read", side.host, side.port)
    return wrong


def _unreachable(
    instance: Instance, field: str, host: str | None, port: int | None
) -> list[str]:
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except OSError as error:
        return [f"{instance.name}: {field}: {host}:{port}: {error}"]
    return []


def http_text(url: str) -> str:
    """Raises CheckError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CheckError(f"{url}: {error}") from None
