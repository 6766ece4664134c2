# SPDX-License-Identifier: Apache-2.0
"""A connector that is told on the command line instead of in configs/connectors/."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.config import ConfigError
from lab.serving.connector import Connector

# What records a step of any vLLM, with or without a connector.
RECORDING = ["step_timing_v1", "step_timing_v2"]


def own_connector(where: str, config: str | None) -> tuple[str, Connector]:
    """(name, connector) of `where`: module:Class, or a name that vLLM knows.

    `config` is a JSON object, added to vLLM's kv_transfer_config. Raises ConfigError.
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
    try:
        told |= msgspec.json.decode(config or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--connector-config {config!r} is not a JSON object: {error}"
        ) from None
    summary = f"{where}, told on the command line"
    return name, Connector(summary=summary, patches=RECORDING, kv_transfer_config=told)
