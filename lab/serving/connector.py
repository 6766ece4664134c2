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
# `package` and `transfer` of TOMLs that were written before there were these keys.
BEFORE_THESE_KEYS: dict[str, tuple[str, Transfer]] = {
    "MooncakeConnector": ("mooncake", "mooncake"),
    "NixlConnector": ("nixl", "nixl"),
    "DirectReadConnector": ("mooncake", "direct_read"),
}


class Companion(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A process that a connector talks to: it lives as long as the engine.

    The engine's Python runs `module` with `arguments`. It is ready when it listens on
    @PORT_1@. `files` are written into @FOLDER@ before, by name.
    """

    module: str
    arguments: list[str] = []
    files: dict[str, str] = {}


class Connector(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One measured configuration: configs/connectors/<name>.toml.

    `engine_args` are further arguments of vLLM's, by the name of the field in its
    EngineArgs. `package` is the Python package of its transfer engine, which must be
    installed. `beside` names a lock in locks/beside/, of packages that come beside the
    engine's own. `transfer` is how a router moves KV between instances that have the
    connector; None if it cannot. `env` is added to the server's environment. With
    `reads_per_s` a peer reads prefixes from the server that often, throughout
    (microbench.direct_read_peer). `report` is what the config is to a report.

    In strings of `kv_transfer_config`, `engine_args`, `env` and `companion`, @FOLDER@
    is a folder of the run's own, and @PORT_1@ to @PORT_9@ are free ports
    (lab.serving.companion).
    """

    summary: str
    patches: list[str]
    patch_parameters: dict[str, int | float | str] = {}
    kv_transfer_config: dict[str, Any] | None = None
    engine_args: dict[str, Any] = {}
    package: str | None = None
    beside: str | None = None
    transfer: Transfer | None = None
    env: dict[str, str] = {}
    companion: Companion | None = None
    reads_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    report: Role = Role()


def needs_company(connector: Connector) -> bool:
    """Whether it is not yet as lab.serving.companion.accompanied makes it."""
    told = str((connector.kv_transfer_config, connector.engine_args, connector.env))
    return connector.companion is not None or "@FOLDER@" in told or "@PORT_" in told


def load_connector(name: str) -> Connector:
    """Raises ConfigError."""
    found = read_toml(CONFIGS / "connectors" / f"{name}.toml", Connector)
    known = (found.kv_transfer_config or {}).get("kv_connector")
    if found.package is None and found.transfer is None and known in BEFORE_THESE_KEYS:
        package, transfer = BEFORE_THESE_KEYS[known]
        return msgspec.structs.replace(found, package=package, transfer=transfer)
    return found
