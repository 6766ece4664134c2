# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/connectors/: what is measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from lab.config import read_toml
from lab.paths import CONFIGS
from lab.records.roles import Role

Transfer = Literal["mooncake", "nixl", "direct_read"]
# What is launched where nobody names a config: vLLM without a connector.
DEFAULT_CONNECTOR = "plain"


class Connector(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One measured configuration: configs/connectors/<name>.toml.

    `package` is the Python package of its transfer engine, which must be installed.
    `transfer` is how a router moves KV between instances that have the connector; None
    if it cannot. `env` is added to the server's environment. With `reads_per_s` a peer
    reads prefixes from the server that often, throughout (microbench.direct_read_peer).
    `report` is what the config is to a report.
    """

    summary: str
    patches: list[str]
    patch_parameters: dict[str, int | float | str] = {}
    kv_transfer_config: dict[str, Any] | None = None
    package: str | None = None
    transfer: Transfer | None = None
    env: dict[str, str] = {}
    reads_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    report: Role = Role()


def load_connector(name: str) -> Connector:
    """Raises ConfigError."""
    return read_toml(CONFIGS / "connectors" / f"{name}.toml", Connector)
