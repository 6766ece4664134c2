# SPDX-License-Identifier: Apache-2.0
"""Are these instances there, and what the instances file says they are?"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

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
        found = _block_tokens(http_text(f"{instance.url}/metrics"))
    except CheckError as error:
        return [f"{instance.name}: {error}"]
    wrong = []
    if found is not None and found != instance.block_tokens:
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


def _block_tokens(metrics: str) -> int | None:
    for family in text_string_to_metric_families(metrics):
        if family.name == "vllm:cache_config_info":
            return int(family.samples[0].labels["block_size"])
    return None


def http_text(url: str) -> str:
    """Raises CheckError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CheckError(f"{url}: {error}") from None
