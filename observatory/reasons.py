# SPDX-License-Identifier: Apache-2.0
"""Why a connector could not be measured, in one line."""

from __future__ import annotations

import re

from lab.serving.connector import Connector
from lab.serving.installation import Installation

FACTORY = "distributed/kv_transfer/kv_connector/factory.py"
# What comes before a line of a traceback in vLLM's logs.
PREFIX = re.compile(r"^(\[rank\d+\]: |\(\w+ pid=\d+\) )")
RAISED = re.compile(r"(?:[\w.]*\.)?(\w*(?:Error|Exception): .+)")
FRAME = re.compile(r'\s*File ".*/(vllm/[^"]+)", line (\d+), in ')


def not_in_release(connector: Connector, installed: Installation) -> str | None:
    """What to say if the release knows no such connector; None if it does."""
    told = connector.kv_transfer_config or {}
    if (name := told.get("kv_connector")) is None:
        return None
    vllm = installed.package("vllm")
    if (module := told.get("kv_connector_module_path")) is None:
        known = f'"{name}"' in (vllm / FACTORY).read_text()
    else:
        # Somebody's own is none of a release's.
        known = (
            not module.startswith("vllm.")
            or (vllm.parent / f"{module.replace('.', '/')}.py").exists()
        )
    return None if known else f"there is no {name} in this release"


def reason(error: str) -> str:
    """The exception at the end of a log, and the line of vLLM that raised it.

    The last line of `error` if there is none.
    """
    lines = [PREFIX.sub("", line) for line in error.strip().splitlines()]
    raised = [number for number, line in enumerate(lines) if RAISED.fullmatch(line)]
    if not raised:
        return lines[-1].strip()
    told = RAISED.fullmatch(lines[raised[-1]])[1]
    if "validation error" in told:
        # Pydantic says what is wrong on a line of its own.
        told = lines[raised[-1] + 1].strip().partition(" [type=")[0]
    frames = [found for line in lines[: raised[-1]] if (found := FRAME.match(line))]
    return f"{told} ({frames[-1][1]}:{frames[-1][2]})" if frames else told
