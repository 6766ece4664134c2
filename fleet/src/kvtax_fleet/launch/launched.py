# SPDX-License-Identifier: Apache-2.0
"""A fleet of vLLM servers on this machine: `kvtax fleet launch`, and experiments'."""

from __future__ import annotations

import argparse
import datetime
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
from kvtax.engine import ServerError, preflight
from kvtax.engine.connector import DEFAULT_CONNECTOR, load_connector
from kvtax.engine.null_model import Checkpoint
from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import Server, tail
from kvtax.paths import REPOSITORY
from kvtax.proc.loopback import open_url
from kvtax.proc.ports import reserve

from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.instance_settings import (
    InstanceSettings,
    read_instance_settings,
)
from kvtax_fleet.launch.spec import (
    FleetSpec,
    Member,
    SpecError,
    assign_gpus,
    members,
    server_of,
)
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.instances import Instance, Role

FORWARD_TOTALS = "forward_totals"


@dataclass(frozen=True)
class LaunchedInstance:
    """An instance, its process and `folder`, where its log and records are."""

    instance: Instance
    server: Server
    folder: Path

    @property
    def forward_totals(self) -> Path:
        """File of the null model's counts (kvtax/engine/vllm_plugin)."""
        return self.folder / FORWARD_TOTALS


@dataclass(frozen=True)
class Workshop:
    """Overlays and the model, shared by launches, in a `folder` of its own.

    Leaving the context removes the folder.
    """

    folder: Path

    def overlay(self, spec: FleetSpec) -> tuple[Path, dict[str, str]]:
        """Make the overlay of the connector; return it with its patches' hashes.

        Raises what kvtax.engine.overlay.build_overlay raises.
        """
        overlay = self.folder / spec.connector_name
        noted = overlay.with_suffix(".patches.json")
        if noted.exists():
            return overlay, msgspec.json.decode(noted.read_bytes())
        # An attempt that was killed may have left one.
        shutil.rmtree(overlay, ignore_errors=True)
        used = spec.connector
        hashes = build_overlay(overlay, used.patches, used.patch_parameters)
        noted.write_bytes(msgspec.json.encode(hashes))
        return overlay, hashes

    def checkpoint(self, settings: InstanceSettings) -> Checkpoint:
        """Make the model's checkpoint, once."""
        return settings.checkpoint(self.folder / "model")

    def __enter__(self) -> Workshop:
        # A killed process may have left it.
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
) -> Iterator[list[LaunchedInstance]]:
    """Begin to start the instances, each with a folder below `folder`.

    Leaving the context stops them all. Raises SpecError, PortsError.
    """
    started: list[LaunchedInstance] = []
    try:
        ports = reserve(len(spec.roles))
        for member in members(spec, ports, assign_gpus(spec)):
            started.append(_start(spec, workshop, folder, member))
        yield started
    finally:
        stop(started)


def _start(
    spec: FleetSpec, workshop: Workshop, folder: Path, member: Member
) -> LaunchedInstance:
    own = folder / member.instance.name
    try:
        own.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(f"{own} is an earlier fleet's: take another folder") from None
    overlay, patches = workshop.overlay(spec)
    model = workshop.checkpoint(spec.settings).folder
    server = server_of(spec, member, overlay, model, own, patches)
    if spec.settings.data_parallel == 1:
        # The totals are one engine's.
        server = server.with_options(KVTAX_FORWARD_TOTALS=str(own / FORWARD_TOTALS))
    return LaunchedInstance(member.instance, Server(server), own)


def wait_ready(fleet: list[LaunchedInstance]) -> float:
    """Wait until all answer; return the seconds. Raises ServerError."""
    began = time.monotonic()
    for launched_instance in fleet:
        launched_instance.server.wait_ready()
    check_alive(fleet)
    return time.monotonic() - began


def check_alive(fleet: list[LaunchedInstance]) -> None:
    """Raise ServerError, with the end of its log, if an instance has ended."""
    for each in fleet:
        if (status := each.server.supervised.poll()) is not None:
            raise ServerError(
                f"{each.instance.name} ended with status {status}\n"
                f"{tail(each.folder / 'server.log')}"
            )


def stop(fleet: list[LaunchedInstance]) -> None:
    """Stop all at once: each takes seconds."""
    if fleet:
        with ThreadPoolExecutor(len(fleet)) as pool:
            list(pool.map(lambda each: each.server.supervised.stop(), fleet))


TIMEOUT_S = 10.0


class NoAnswer(Exception):
    """An instance does not answer; the message says which URL and why."""

    exit_code = 3


def http_text(url: str) -> str:
    """Fetch a page as text. Raises NoAnswer."""
    try:
        with open_url(url, TIMEOUT_S) as response:
            return str(response.read().decode())
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{url}: {error}") from None


PROFILE = CONFIGS / "profiles" / "h20-30b-a3b.toml"
ALIVE_EVERY_S = 1.0
ROLES: dict[str, Role] = {"both": "both", "prefill": "prefill", "decode": "decode"}


def run(arguments: argparse.Namespace) -> NoReturn:
    """Start the fleet and run it until a signal ends it.

    Raises what launching does.
    """
    spec = _spec(arguments)
    preflight.check_resources(spec.settings, len(spec.roles))
    preflight.check_connector(spec.connector)
    folder = (arguments.folder or _new_folder()).resolve()
    out = folder / "instances.json"
    with (
        Workshop(folder / "workshop") as workshop,
        launched(spec, workshop, folder) as fleet,
    ):
        ready_s = wait_ready(fleet)
        write_instances(out, [each.instance for each in fleet])
        try:
            _report(fleet, ready_s, out)
            while True:
                check_alive(fleet)
                time.sleep(ALIVE_EVERY_S)
        finally:
            # No proxy may read the addresses of a fleet that is gone.
            out.unlink(missing_ok=True)


def _spec(arguments: argparse.Namespace) -> FleetSpec:
    settings = read_instance_settings(arguments.profile or PROFILE)
    roles: list[Role] = ["both"] * arguments.instances
    if arguments.roles:
        named = arguments.roles.split(",")
        if unknown := set(named) - ROLES.keys():
            raise SpecError(f"--roles: there is no role {unknown.pop()!r}")
        roles = [ROLES[name] for name in named]
    name = arguments.connector or DEFAULT_CONNECTOR
    return FleetSpec(settings, name, load_connector(name), roles)


def _new_folder() -> Path:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return REPOSITORY / "runs" / f"{now}-fleet"


def _report(fleet: list[LaunchedInstance], ready_s: float, out: Path) -> None:
    for each in fleet:
        instance = each.instance
        pss_mib = each.server.pss_mib()
        print(f"{instance.name}  {instance.url}  {instance.role}  {pss_mib:.0f} MiB")
    print(f"ready after {ready_s:.1f} s: {out}", flush=True)
