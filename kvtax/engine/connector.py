# SPDX-License-Identifier: Apache-2.0
"""Configs of connectors: the TOML files under configs/connectors/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvtax.config import ConfigError, read_toml
from kvtax.paths import CONFIGS
from kvtax.records.run import Role

Transfer = Literal["mooncake", "nixl", "direct_read"]
# What is launched where nobody names a config: vLLM without a connector.
DEFAULT_CONNECTOR = "plain"


class Companion(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A process that a connector talks to: it lives as long as the engine.

    The engine's Python runs `module` with `arguments`. It is ready when it listens on
    @PORT_1@. `files` are written into @FOLDER@ before, by name.
    """

    module: str
    arguments: list[str] = []
    files: dict[str, str] = {}


class Connector(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One measured config: configs/connectors/<name>.toml, or a table of a family.

    `engine_args` are further arguments of vLLM's, by the name of the field in its
    EngineArgs. `package` is the Python package of its transfer engine, which must be
    installed. `beside` names a lock in locks/beside/, of packages that come beside the
    engine's own. `transfer` is how a router moves KV between instances that have the
    connector; None if it cannot. `env` is added to the server's environment. With
    `reads_per_s` a peer reads prefixes from the server that often, throughout
    (connectors.direct_read.peer). `report` is what the config is to a report.

    In strings of `kv_transfer_config`, `engine_args`, `env` and `companion`, @FOLDER@
    is a folder of the run's own, and @PORT_1@ to @PORT_9@ are free ports
    (kvtax.engine.companion).
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
    """True until kvtax.engine.companion.accompanied has filled in the companion."""
    told = str((connector.kv_transfer_config, connector.engine_args, connector.env))
    return connector.companion is not None or "@FOLDER@" in told or "@PORT_" in told


def load_connector(name: str) -> Connector:
    """Read the config `name`; `family/name` is a table of `family.toml`.

    Raises ConfigError.
    """
    family, slash, table = name.partition("/")
    if not slash:
        return read_toml(_file(name), Connector)
    configs = _read_family(family)
    if table not in configs:
        raise ConfigError(
            f"no connector config named {name!r}; {_file(family)} has "
            f"{', '.join(configs)}"
        )
    return configs[table]


def connector_names() -> list[str]:
    """Names of all configs, a family's in the order of its file. Raises ConfigError."""
    names = []
    for file in sorted(_file("*").parent.glob("*.toml")):
        tables = read_toml(file, dict[str, Any])
        is_family = all(isinstance(table, dict) for table in tables.values())
        names += (
            [f"{file.stem}/{table}" for table in tables] if is_family else [file.stem]
        )
    return names


def _read_family(family: str) -> dict[str, Connector]:
    return read_toml(_file(family), dict[str, Connector])


def _file(name: str) -> Path:
    return CONFIGS / "connectors" / f"{name}.toml"
