# SPDX-License-Identifier: Apache-2.0
"""Messages between the two sides of the connector, which vLLM carries."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from connectors.direct_read.protocol import WorkerAddress
from connectors.direct_read.reads import Pull


@dataclass
class DirectReadMetadata(KVConnectorMetadata):
    """For one step. `counts` are the scheduler's: see metrics.py."""

    pulls: list[Pull] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class DirectReadHandshake(KVConnectorHandshakeMetadata):
    """A worker's memory: where it is, and how it is laid out."""

    address: WorkerAddress
    layout: dict[str, str]
