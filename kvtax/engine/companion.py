# SPDX-License-Identifier: Apache-2.0
"""Needs of a connector beside its engine: a folder, ports, a process to talk to."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvtax.engine import ServerError
from kvtax.engine.connector import Companion, Connector
from kvtax.engine.installation import Installation
from kvtax.engine.provenance import secrets_in
from kvtax.engine.releases import beside
from kvtax.engine.server import tail
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from kvtax.proc.supervise import Supervised

READY_DEADLINE_S = 120.0
PORTS = 9
# In a connector's TOML. What is put in for them differs from run to run.
PLACES = ("kv_transfer_config", "engine_args", "env", "companion")


@contextmanager
def accompanied(
    connector: Connector, folder: Path, installed: Installation
) -> Iterator[Connector]:
    """Fill in the connector for this run, and run its companion, if it has one.

    What it writes goes into `folder`, which is there. Raises ServerError if the
    companion does not start, and PortsError.
    """
    first = reserve(1)[0].http
    given = {f"@PORT_{number + 1}@": str(first + number) for number in range(PORTS)}
    given["@FOLDER@"] = str(folder)
    filled = msgspec.structs.replace(
        connector,
        **{place: _filled(getattr(connector, place), given) for place in PLACES},
    )
    if filled.companion is None:
        yield filled
        return
    for name, text in filled.companion.files.items():
        (folder / name).write_text(text)
    log = folder / "companion.log"
    command = installed.command(
        "-m", filled.companion.module, *filled.companion.arguments
    )
    secrets = secrets_in(filled.companion.arguments, filled.env)
    env = _environment(filled, installed)
    with Supervised(command, env, log, secrets=secrets) as process:
        _wait_ready(process, first, log)
        yield msgspec.structs.replace(filled, companion=None)


def _filled(value: Any, given: dict[str, str]) -> Any:
    """`value` with what is given in place of its names, in all strings within."""
    if isinstance(value, Companion):
        return msgspec.convert(_filled(msgspec.to_builtins(value), given), Companion)
    if isinstance(value, dict):
        return {key: _filled(item, given) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, given) for item in value]
    if isinstance(value, str):
        for name, text in given.items():
            value = value.replace(name, text)
    return value


def _environment(connector: Connector, installed: Installation) -> dict[str, str]:
    folder = beside(connector.beside, installed)
    path = [folder, installed.sources, REPOSITORY, os.environ.get("PYTHONPATH")]
    paths = os.pathsep.join(str(place) for place in path if place)
    return os.environ | {"PYTHONPATH": paths} | connector.env


def _wait_ready(process: Supervised, port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        if _listens(port):
            return
        time.sleep(0.1)
    raise ServerError(f"the connector's companion did not start\n{tail(log)}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
