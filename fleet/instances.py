# SPDX-License-Identifier: Apache-2.0
"""The instances of a fleet: the file that the launcher writes and the proxy reads.

One JSON object, schema kvtax.instances/1: {"schema": ..., "instances": [...]}.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from lab.records.documents import write_document

SCHEMA = "kvtax.instances/1"
Role = Literal["both", "prefill", "decode"]
ConnectorKind = Literal["noop", "mooncake", "nixl", "direct_read"]


class InstancesError(Exception):
    """An instances file is missing or wrong; the message names file and field."""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where something listens: a direct_read side channel, say."""

    host: str
    port: int


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server, as the proxy needs to know it.

    `bootstrap_url` is Mooncake's bootstrap server, `kv_events` and
    `kv_events_replay` are ZMQ endpoints, None where the instance has none.
    `connector` is the kind of transfer it can take part in; None: plain vLLM.
    """

    name: str
    url: str
    role: Role = "both"
    connector: ConnectorKind | None = None
    bootstrap_url: str | None = None
    direct_read: Address | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    block_tokens: int = 16


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: `instances` in a fixed order, with names and URLs all different."""

    instances: list[Instance]
    schema: Literal["kvtax.instances/1"] = SCHEMA

    def __post_init__(self) -> None:
        if not self.instances:
            raise ValueError("`instances` is empty")
        for field in ("name", "url"):
            values = Counter(getattr(instance, field) for instance in self.instances)
            if twice := [value for value, count in values.items() if count > 1]:
                raise ValueError(f"two instances have the {field} {twice[0]!r}")
        for instance in self.instances:
            if urlsplit(instance.url).scheme not in ("http", "https"):
                raise ValueError(f"{instance.name}: {instance.url!r} is no http URL")
            if instance.block_tokens < 1:
                raise ValueError(f"{instance.name}: `block_tokens` is not above 0")


def read_instances(path: Path) -> list[Instance]:
    """Raises InstancesError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Fleet).instances
    except OSError as error:
        raise InstancesError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InstancesError(f"{path}: {error}") from None


def write_instances(path: Path, instances: list[Instance]) -> None:
    """Write the file whole or not at all."""
    write_document(path, Fleet(instances))
