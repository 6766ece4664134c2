# SPDX-License-Identifier: Apache-2.0
"""A fleet of vLLM servers on this machine: all start together, all stop together."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet.instances import Instance
from fleet.launch import settings
from fleet.launch.ports import Ports, reserve
from fleet.launch.profile import FleetProfile
from fleet.launch.settings import SettingsError, Spec
from lab.serving.null_model import write_model, write_null_model
from lab.serving.server import Server, ServerError, tail
from lab.serving.tree import build_tree, installed_package


@dataclass(frozen=True)
class LaunchedInstance:
    """An instance, its process and `folder`, where its log and records are."""

    instance: Instance
    server: Server
    folder: Path

    @property
    def forward_totals(self) -> Path:
        """Where the null model counts: lab/serving/vllm_plugin says what."""
        return self.folder / "forward_totals"


@dataclass(frozen=True)
class Workshop:
    """What launches share: patched trees, compiled bytecode and the model.

    `folder` must be one of its own; leaving the context removes it.
    """

    folder: Path

    def tree(self, spec: Spec) -> tuple[Path, dict[str, str]]:
        """The private vLLM of the connector, and the hashes of its patches.

        Raises what lab.serving.tree.build_tree raises.
        """
        tree, hashes = self.folder / spec.connector_name, {}
        noted = tree.with_suffix(".patches.json")
        if noted.exists():
            return tree, msgspec.json.decode(noted.read_bytes())
        base = installed_package("vllm")
        used = spec.connector
        hashes = build_tree(tree, base, used.patches, used.patch_parameters)
        noted.write_bytes(msgspec.json.encode(hashes))
        return tree, hashes

    def model(self, profile: FleetProfile) -> tuple[Path, int]:
        """The checkpoint's folder and its vocabulary size."""
        folder = self.folder / "model"
        if profile.forward is None:
            return write_model(folder, _Real(profile.model))
        cost = msgspec.to_builtins(profile.forward)
        return write_null_model(folder, profile.max_model_len, cost)

    @property
    def bytecode(self) -> dict[str, str]:
        """vLLM's and torch's imports are compiled once for all: half of a start."""
        return {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"),
        }

    def __enter__(self) -> Workshop:
        # Left by one that was killed.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _Real:
    """What lab.serving.null_model.write_model asks of a profile."""

    model: str | None
    null_model: bool = False


@contextmanager
def launched(
    spec: Spec, workshop: Workshop, folder: Path, base_port: int | None = None
) -> Iterator[list[LaunchedInstance]]:
    """The instances that have begun to start, each with a folder below `folder`.

    Leaving the context stops them all. Raises SettingsError, PortsError.
    """
    sockets = Path(tempfile.mkdtemp(prefix="kvtax-events-"))
    started: list[LaunchedInstance] = []
    try:
        ports = reserve(len(spec.roles), base_port)
        for index, own in enumerate(ports):
            started.append(_start(spec, workshop, folder, sockets, index, own))
        yield started
    finally:
        stop(started)
        shutil.rmtree(sockets, ignore_errors=True)


def _start(
    spec: Spec,
    workshop: Workshop,
    folder: Path,
    sockets: Path,
    index: int,
    ports: Ports,
) -> LaunchedInstance:
    made = settings.instance(spec, index, ports, sockets)
    own = folder / made.name
    try:
        own.mkdir(parents=True)
    except FileExistsError:
        raise SettingsError(
            f"{own} is an earlier fleet's: take another folder"
        ) from None
    env = workshop.bytecode | {"KVTAX_FORWARD_TOTALS": str(own / "forward_totals")}
    tree, patches = workshop.tree(spec)
    server = Server(
        tree,
        settings.own_profile(spec, index, made, ports, env),
        settings.own_connector(spec, made),
        workshop.model(spec.profile)[0],
        own,
        {"config": spec.connector_name, "repeat": 0, "patches": patches},
        own / "server.log",
        [ports.http, ports.nixl, ports.bootstrap],
    )
    return LaunchedInstance(made, server, own)


def wait_ready(fleet: list[LaunchedInstance]) -> float:
    """Seconds until all answered. Raises ServerError."""
    began = time.monotonic()
    for launched_instance in fleet:
        launched_instance.server.wait_ready()
    check_alive(fleet)
    return time.monotonic() - began


def check_alive(fleet: list[LaunchedInstance]) -> None:
    """Raises ServerError with the end of the log of one that has ended."""
    for each in fleet:
        if (status := each.server.supervised.poll()) is not None:
            raise ServerError(
                f"{each.instance.name} ended with status {status}\n"
                f"{tail(each.folder / 'server.log')}"
            )


def stop(fleet: list[LaunchedInstance]) -> None:
    """All at once: each takes seconds."""
    if fleet:
        with ThreadPoolExecutor(len(fleet)) as pool:
            list(pool.map(lambda each: each.server.supervised.stop(), fleet))
