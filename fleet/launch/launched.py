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

from fleet.launch.gpus import shared_out
from fleet.launch.instance_settings import InstanceSettings
from fleet.launch.spec import FleetSpec, Member, SpecError, members, server_of
from lab.records.instances import Instance
from lab.serving.installation import installation
from lab.serving.null_model import Checkpoint
from lab.serving.ports import LOOPBACK, reserve
from lab.serving.server import Server, ServerError, tail
from lab.serving.tree import build_tree

FORWARD_TOTALS = "forward_totals"


@dataclass(frozen=True)
class LaunchedInstance:
    """An instance, its process and `folder`, where its log and records are."""

    instance: Instance
    server: Server
    folder: Path

    @property
    def forward_totals(self) -> Path:
        """Where the null model counts: lab/serving/vllm_plugin says what."""
        return self.folder / FORWARD_TOTALS


@dataclass(frozen=True)
class Workshop:
    """What launches share: patched trees and the model.

    `folder` must be one of its own; leaving the context removes it.
    """

    folder: Path

    def tree(self, spec: FleetSpec) -> tuple[Path, dict[str, str]]:
        """The private vLLM of the connector, and the hashes of its patches.

        Raises what lab.serving.tree.build_tree raises.
        """
        tree = self.folder / spec.connector_name
        noted = tree.with_suffix(".patches.json")
        if noted.exists():
            return tree, msgspec.json.decode(noted.read_bytes())
        # Left by an attempt in which a patch did not fit.
        shutil.rmtree(tree, ignore_errors=True)
        base = installation().package("vllm")
        used = spec.connector
        hashes = build_tree(tree, base, used.patches, used.patch_parameters)
        noted.write_bytes(msgspec.json.encode(hashes))
        return tree, hashes

    def checkpoint(self, settings: InstanceSettings) -> Checkpoint:
        return settings.checkpoint(self.folder / "model")

    def __enter__(self) -> Workshop:
        # Left by one that was killed.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def launched(
    spec: FleetSpec,
    workshop: Workshop,
    folder: Path,
    base_port: int | None = None,
    host: str = LOOPBACK,
) -> Iterator[list[LaunchedInstance]]:
    """The instances that have begun to start, each with a folder below `folder`.

    They listen on the address `host`. Leaving the context stops them all.
    Raises SpecError, PortsError.
    """
    sockets = Path(tempfile.mkdtemp(prefix="kvtax-events-"))
    started: list[LaunchedInstance] = []
    try:
        ports = reserve(len(spec.roles), base_port, host)
        for member in members(spec, ports, shared_out(spec), sockets):
            started.append(_start(spec, workshop, folder, member))
        yield started
    finally:
        stop(started)
        shutil.rmtree(sockets, ignore_errors=True)


def _start(
    spec: FleetSpec, workshop: Workshop, folder: Path, member: Member
) -> LaunchedInstance:
    own = folder / member.instance.name
    try:
        own.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(f"{own} is an earlier fleet's: take another folder") from None
    tree, patches = workshop.tree(spec)
    model = workshop.checkpoint(spec.settings).folder
    server = server_of(spec, member, tree, model, own, patches)
    if spec.settings.data_parallel == 1:
        # The totals are one engine's.
        server = server.told(KVTAX_FORWARD_TOTALS=str(own / FORWARD_TOTALS))
    return LaunchedInstance(member.instance, Server(server), own)


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
