# SPDX-License-Identifier: Apache-2.0
"""`kvtax fleet launch`: start a fleet until a signal ends it, or check one."""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

from kvtax.engine import preflight
from kvtax.engine.connector import DEFAULT_CONNECTOR, load_connector
from kvtax.paths import REPOSITORY

from kvtax_fleet.instances import read_instances, write_instances
from kvtax_fleet.launch.instance_settings import read_instance_settings, slowed
from kvtax_fleet.launch.launched import (
    LaunchedInstance,
    Workshop,
    check_alive,
    check_instances,
    launched,
    wait_ready,
)
from kvtax_fleet.launch.spec import (
    FleetSpec,
    SpecError,
)
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.instances import Role

PROFILE = CONFIGS / "profiles" / "h20-30b-a3b.toml"
ALIVE_EVERY_S = 1.0
ROLES: dict[str, Role] = {"both": "both", "prefill": "prefill", "decode": "decode"}


def run(arguments: argparse.Namespace) -> int:
    """Check or start the fleet; return the exit code. Starting ends by a signal.

    Raises what launching does.
    """
    if arguments.check:
        return _check(arguments.check)
    _start(arguments)
    return 0


def _check(file: Path) -> int:
    instances = read_instances(file)
    check_instances(instances)
    print(f"{len(instances)} instances are in order")
    return 0


def _check_machine(spec: FleetSpec) -> None:
    preflight.check_resources(spec.settings, len(spec.roles))
    preflight.check_connector(spec.connector)


def _start(arguments: argparse.Namespace) -> None:
    spec = _spec(arguments)
    _check_machine(spec)
    folder = (arguments.folder or _new_folder()).resolve()
    out = (arguments.out or folder / "instances.json").resolve()
    with (
        Workshop(folder / "workshop") as workshop,
        launched(spec, workshop, folder, arguments.base_port) as fleet,
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
    profile = read_instance_settings(arguments.profile or PROFILE)
    settings = slowed(profile, arguments.time_factor)
    roles: list[Role] = ["both"] * arguments.instances
    if arguments.roles:
        named = arguments.roles.split(",")
        if unknown := set(named) - ROLES.keys():
            raise SpecError(f"--roles: there is no role {unknown.pop()!r}")
        roles = [ROLES[name] for name in named]
    name = arguments.connector or DEFAULT_CONNECTOR
    return FleetSpec(settings, name, load_connector(name), roles, arguments.kv_events)


def _new_folder() -> Path:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return REPOSITORY / "runs" / f"{now}-fleet"


def _report(fleet: list[LaunchedInstance], ready_s: float, out: Path) -> None:
    for each in fleet:
        instance = each.instance
        pss_mib = each.server.pss_mib()
        print(f"{instance.name}  {instance.url}  {instance.role}  {pss_mib:.0f} MiB")
    print(f"ready after {ready_s:.1f} s: {out}", flush=True)
