# SPDX-License-Identifier: Apache-2.0
"""Connectors: tables of the TOML files under configs/connectors/, or options.

A config's name is the name of its table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvtax.config import ConfigError, read_toml, require_shallow
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
    """One measured config: a table of a file in configs/connectors/.

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
    """Return whether kvtax.engine.companion.accompanied has yet to fill it in."""
    text = str((connector.kv_transfer_config, connector.engine_args, connector.env))
    return connector.companion is not None or FOLDER in text or "@PORT_" in text


def load_connector(name: str) -> Connector:
    """Read the config `name`. Raises ConfigError."""
    configs = _read_all()
    if name not in configs:
        raise ConfigError(
            f"no connector config named {name!r}; there are: {', '.join(configs)}"
        )
    return configs[name]


def connector_names() -> list[str]:
    """Names of all configs, a family's in the order of its file. Raises ConfigError."""
    return list(_read_all())


def _read_all() -> dict[str, Connector]:
    configs: dict[str, Connector] = {}
    for file in sorted((CONFIGS / "connectors").glob("*.toml")):
        tables = _read(file, file.stat().st_mtime_ns)
        if twice := configs.keys() & tables.keys():
            raise ConfigError(f"{file}: another file has {min(twice)}, too")
        configs |= tables
    return configs


@functools.cache
def _read(file: Path, changed_ns: int) -> dict[str, Connector]:
    return read_toml(file, dict[str, Connector])


EXTRA, FOLDER = "kv_connector_extra_config", "@FOLDER@"
# What records a step of any vLLM, with or without a connector.
RECORDING = ["step_timing_v2"]
# Patches without which some of vLLM's own connectors need a GPU.
STAND_INS = (
    "cpu_kernel_scan",
    "cpu_streams",
    "example_cpu_layout",
    "mooncake_cpu_layout",
    "nixl_cpu_layout",
)


def own_connector(where: str, config: str | None) -> tuple[str, Connector]:
    """(name, connector) of `where`: module:Class, or a name that vLLM knows.

    `config` is a JSON object, added to vLLM's kv_transfer_config, or `@FILE` with one;
    nulls in it, and an empty text, are as if not given.
    Without one of its own, a connector of vLLM's has the extra config of ours: it keeps
    what ExampleConnector writes in the run's folder. Raises ConfigError.
    """
    module, colon, name = where.rpartition(":")
    parts = [name, *(module.split(".") if colon else [])]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"--connector {where!r}: want module:Class, such as mypkg.kv:MyConnector, "
            "or the name of a connector that vLLM has, such as ExampleConnector"
        )
    transfer: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both"}
    if module:
        transfer["kv_connector_module_path"] = module
    given, source = config or "{}", "--connector-config"
    try:
        if given.startswith("@"):
            source += f" {given}"
            given = Path(given[1:]).read_text()
        decoded = msgspec.json.decode(given, type=dict[str, Any] | None) or {}
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # It may have passwords, and is not printed.
        raise ConfigError(f"{source} is not a JSON object: {error}") from None
    require_shallow(decoded, source)
    config_given = {key: value for key, value in decoded.items() if value is not None}
    for key in ("kv_connector", "kv_connector_module_path"):
        if key in config_given and config_given[key] != transfer.get(key):
            raise ConfigError(
                f"{source} has a {key} that is not {where}'s; name one connector, and "
                "leave the key out"
            )
    transfer = _extra_config(transfer) | transfer | config_given
    return name, Connector(
        summary=f"{where}, given on the command line",
        patches=RECORDING,
        kv_transfer_config=transfer,
    )


def _extra_config(transfer: dict[str, Any]) -> dict[str, Any]:
    """Return our extra config of a connector if all of ours write to a run's folder."""
    alike = [
        ours.get(EXTRA, {})
        for config in _read_all().values()
        if (ours := config.kv_transfer_config or {}) | {EXTRA: None}
        == transfer | {EXTRA: None}
    ]
    if alike and all(FOLDER in str(extra) for extra in alike):
        return {} if "connectors" in alike[0] else {EXTRA: alike[0]}
    return {}


def stand_ins(connector: Connector) -> list[str]:
    """List the STAND_INS that configs of vLLM's own connectors have.

    Children of a MultiConnector count, connectors of somebody's own do not.
    """
    names = set(_names_in_vllm(connector.kv_transfer_config))
    configs = _read_all().values() if names else ()
    patches = {
        patch
        for config in configs
        if (own := {*_names_in_vllm(config.kv_transfer_config)}) and own <= names
        for patch in config.patches
    }
    return [patch for patch in STAND_INS if patch in patches]


def _names_in_vllm(config: object) -> Iterator[str]:
    """Yield the connectors of `config`, at any depth, that have no module path."""
    if isinstance(config, list):
        for part in config:
            yield from _names_in_vllm(part)
    elif isinstance(config, dict):
        name = config.get("kv_connector")
        if isinstance(name, str) and "kv_connector_module_path" not in config:
            yield name
        yield from _names_in_vllm(list(config.values()))
