# SPDX-License-Identifier: Apache-2.0
"""Start a fleet of vLLM instances on this machine, or check one that runs elsewhere.

The fleet runs until Ctrl-C (or SIGTERM), and nothing of it outlives this command.
Exit status: 130 stopped by Ctrl-C, 143 by SIGTERM; 0 the checked fleet is in order, or
the dry run found nothing against it; 1 an instance did not start, died or is not in
order; 2 the arguments make no sense.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from pathlib import Path

from fleet.instances import InstancesError, read_instances, write_instances
from fleet.launch.check import CheckError, check_instances
from fleet.launch.gpus import shared_out
from fleet.launch.instance_settings import read_instance_settings, slowed
from fleet.launch.launched import (
    LaunchedInstance,
    Workshop,
    check_alive,
    launched,
    wait_ready,
)
from fleet.launch.spec import FleetSpec, SpecError, members, server_of
from lab.config import ConfigError
from lab.paths import CONFIGS, REPOSITORY
from lab.serving import preflight
from lab.serving.connector import DEFAULT_CONNECTOR, load_connector
from lab.serving.ports import PortsError, reserve
from lab.serving.server import ServerError
from lab.serving.supervise import exit_on_signals

PROFILE = CONFIGS / "fleet" / "h20-30b-a3b.toml"
ALIVE_EVERY_S = 1.0


def main() -> int:
    arguments = _arguments()
    exit_on_signals()
    try:
        if arguments.check:
            return _check(arguments.check)
        if arguments.dry_run:
            return _dry_run(arguments)
        return _run(arguments)
    except (ConfigError, InstancesError, SpecError, PortsError) as error:
        print(f"fleet.launch: {error}", file=sys.stderr)
        return 2
    except (ServerError, CheckError, *preflight.CONFIG_ERRORS) as error:
        print(f"fleet.launch: {error}", file=sys.stderr)
        return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.launch", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--instances", type=int, default=4, metavar="N")
    parser.add_argument(
        "--roles", help="comma-separated, one per instance: both, prefill, decode"
    )
    parser.add_argument(
        "--profile", type=Path, default=PROFILE, help="a file of configs/fleet/"
    )
    parser.add_argument(
        "--connector", default=DEFAULT_CONNECTOR, help="of configs/connectors/"
    )
    parser.add_argument(
        "--kv-events", action="store_true", help="publish KV cache events over ZMQ"
    )
    parser.add_argument(
        "--time-factor",
        type=float,
        default=1.0,
        help="of the null model's simulated forward time",
    )
    parser.add_argument("--base-port", type=int, help="default: any that are free")
    parser.add_argument(
        "--folder", type=Path, help="logs and records go here (default: runs/...)"
    )
    parser.add_argument(
        "--out", type=Path, help="the instances file (default: in --folder)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: say what each instance would be told, and on which GPUs",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="start nothing: check the instances of this file",
    )
    return parser.parse_args()


def _check(file: Path) -> int:
    instances = read_instances(file)
    check_instances(instances)
    print(f"{len(instances)} instances are in order")
    return 0


def _dry_run(arguments: argparse.Namespace) -> int:
    spec = _spec(arguments)
    _check_machine(spec)
    places = Path("PATCHED_VLLM"), Path("MODEL"), Path("FOLDER")
    ports = reserve(len(spec.roles), arguments.base_port)
    for member in members(spec, ports, shared_out(spec), Path("SOCKETS")):
        server = server_of(spec, member, *places)
        gpus = f"GPU {', '.join(map(str, member.gpus))}" if member.gpus else "no GPU"
        print(f"{member.instance.name}  {member.instance.role}  {gpus}")
        print(f"  {shlex.join(server.argv)}")
    return 0


def _check_machine(spec: FleetSpec) -> None:
    preflight.check_resources(spec.settings, len(spec.roles))
    preflight.check_connector(spec.connector)


def _run(arguments: argparse.Namespace) -> int:
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
            # Nobody shall be sent to a fleet that is gone.
            out.unlink(missing_ok=True)


def _spec(arguments: argparse.Namespace) -> FleetSpec:
    settings = slowed(read_instance_settings(arguments.profile), arguments.time_factor)
    roles = ["both"] * arguments.instances
    if arguments.roles:
        roles = arguments.roles.split(",")
        if unknown := set(roles) - {"both", "prefill", "decode"}:
            raise SpecError(f"--roles: there is no role {unknown.pop()!r}")
    if not roles:
        raise SpecError("--instances must be at least 1")
    connector = load_connector(arguments.connector)
    return FleetSpec(
        settings, arguments.connector, connector, roles, arguments.kv_events
    )


def _new_folder() -> Path:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return REPOSITORY / "runs" / f"{now}-fleet"


def _report(fleet: list[LaunchedInstance], ready_s: float, out: Path) -> None:
    for each in fleet:
        instance = each.instance
        rss_mib = each.server.peak_rss_mib()
        print(f"{instance.name}  {instance.url}  {instance.role}  {rss_mib:.0f} MiB")
    print(f"ready after {ready_s:.1f} s: {out}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
