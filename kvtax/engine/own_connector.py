# SPDX-License-Identifier: Apache-2.0
"""A connector that is told on the command line instead of in configs/connectors/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtax.config import ConfigError
from kvtax.engine.connector import Connector, connector_names, load_connector

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

    `config` is a JSON object, added to vLLM's kv_transfer_config, or `@FILE` with one.
    Raises ConfigError.
    """
    module, colon, name = where.rpartition(":")
    parts = [name, *(module.split(".") if colon else [])]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"--connector {where!r}: want module:Class, such as mypkg.kv:MyConnector, "
            "or the name of a connector that vLLM has, such as ExampleConnector"
        )
    told: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both"}
    if module:
        told["kv_connector_module_path"] = module
    given, source = config or "{}", "--connector-config"
    try:
        if given.startswith("@"):
            source += f" {given}"
            given = Path(given[1:]).read_text()
        config_given = msgspec.json.decode(given, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # It may have passwords, and is not printed.
        raise ConfigError(f"{source} is not a JSON object: {error}") from None
    for key in ("kv_connector", "kv_connector_module_path"):
        if key in config_given and config_given[key] != told.get(key):
            raise ConfigError(
                f"{source} has a {key} that is not {where}'s; name one connector, and "
                "leave the key out"
            )
    told |= config_given
    summary = f"{where}, told on the command line"
    return name, Connector(summary=summary, patches=RECORDING, kv_transfer_config=told)


def stand_ins(connector: Connector) -> list[str]:
    """List the STAND_INS that configs of vLLM's own connectors have.

    Children of a MultiConnector count, connectors of somebody's own do not.
    """
    names = set(_names_in_vllm(connector.kv_transfer_config))
    configs = map(load_connector, connector_names()) if names else ()
    patches = {
        patch
        for config in configs
        if names.issuperset(_names_in_vllm(config.kv_transfer_config))
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
