# SPDX-License-Identifier: Apache-2.0
"""The specification of a fleet: its instances' roles, addresses, GPUs and servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from kvtax.engine.connector import Connector, needs_company
from kvtax.engine.gpus import NoGpu, visible_gpus
from kvtax.engine.server import ServerSpec, resolve
from kvtax.proc.ports import LOOPBACK, Ports

from kvtax_fleet.launch.instance_settings import InstanceSettings
from kvtax_fleet.records.instances import Instance, Role

KV_ROLES: dict[Role, str] = {
    "both": "kv_both",
    "prefill": "kv_producer",
    "decode": "kv_consumer",
}
# Transfers with which one instance may prefill and another decode.
HANDED_OVER = ("mooncake", "nixl")


class SpecError(Exception):
    """A fleet that cannot work was requested; the message says why."""

    exit_code = 2


@dataclass(frozen=True)
class FleetSpec:
    """A fleet to be launched on this machine: an instance for each of `roles`."""

    settings: InstanceSettings
    connector_name: str
    connector: Connector
    roles: list[Role] = field(default_factory=lambda: ["both"])


@dataclass(frozen=True)
class Member:
    """One instance of a fleet to be launched, with ports and GPUs of its own."""

    instance: Instance
    ports: Ports
    gpus: list[int]


def members(spec: FleetSpec, ports: list[Ports], gpus: list[list[int]]) -> list[Member]:
    """Make a member for each role.

    Raises SpecError as check_spec does.
    """
    check_spec(spec)
    return [
        Member(_instance(spec, index, own), own, gpus[index])
        for index, own in enumerate(ports)
    ]


def check_spec(spec: FleetSpec) -> None:
    """Raise SpecError if the connector cannot be launched, or in one of the roles."""
    if needs_company(spec.connector):
        raise SpecError(
            f"{spec.connector_name} needs a companion, or a folder of its own: only "
            "the sweep and the observatory give it those"
        )
    for role in spec.roles:
        if role != "both" and spec.connector.transfer not in HANDED_OVER:
            raise SpecError(
                f"role {role} needs a connector that moves KV, and "
                f"{spec.connector_name} has no `transfer` of "
                f"{' or '.join(HANDED_OVER)} in its TOML"
            )


def _instance(spec: FleetSpec, index: int, ports: Ports) -> Instance:
    transfer = spec.connector.transfer
    role = spec.roles[index]
    bootstrap = f"http://{LOOPBACK}:{ports.bootstrap}"
    # Only an instance that sends KV has a bootstrap server.
    bootstraps = transfer == "mooncake" and role != "decode"
    return Instance(
        name=f"i{index}",
        url=f"http://{LOOPBACK}:{ports.http}",
        role=role,
        connector=transfer,
        bootstrap_url=bootstrap if bootstraps else None,
        block_tokens=spec.settings.block_size,
        kv_tokens=_kv_tokens(spec.settings),
    )


def _kv_tokens(settings: InstanceSettings) -> int | None:
    """Compute how many tokens the cache holds; None if vLLM decides."""
    if settings.num_blocks is None:
        return None
    return settings.num_blocks * settings.block_size * settings.data_parallel


def own_connector(spec: FleetSpec, role: Role) -> Connector:
    """Configure the connector for an instance of this role."""
    shared = spec.connector.kv_transfer_config
    if shared is None:
        return spec.connector
    own = shared | {"kv_role": KV_ROLES[role]}
    return msgspec.structs.replace(spec.connector, kv_transfer_config=own)


def server_of(
    spec: FleetSpec,
    member: Member,
    overlay: Path,
    model: Path,
    folder: Path,
    patches: dict[str, str] | None = None,
) -> ServerSpec:
    """Specify the server of a member, patched by `overlay`, with files in `folder`.

    Raises ServerError.
    """
    connector = own_connector(spec, member.instance.role)
    label = {"config": spec.connector_name, "repeat": 0, "patches": patches or {}}
    server = resolve(
        connector,
        spec.settings,
        model,
        folder,
        label,
        overlay=overlay,
        ports=member.ports,
    )
    env: dict[str, str] = {}
    if member.gpus:
        # Numbered as nvidia-smi numbers them.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, member.gpus))
    return server.with_options("--enable-prompt-tokens-details", **env)


def assign_gpus(spec: FleetSpec) -> list[list[int]]:
    """List the GPUs of each instance: one for each worker, none shared.

    GPUs have nvidia-smi's numbers, and the order of CUDA_VISIBLE_DEVICES if that is
    set. The lists are empty without GPUs in the fleet. Raises SpecError if there are
    too few.
    """
    workers = spec.settings.workers
    if spec.settings.flavour != "gpu":
        return [[] for _ in spec.roles]
    try:
        indices = [gpu.index for gpu in visible_gpus()]
    except NoGpu as error:
        raise SpecError(f"instances with GPUs cannot be started: {error}") from None
    if len(indices) < workers * len(spec.roles):
        raise SpecError(
            f"{len(spec.roles)} instances of {workers} workers need a GPU for each "
            f"worker, and {len(indices)} can be seen here: start fewer, or ask for "
            "less `tensor_parallel`"
        )
    return [
        indices[first : first + workers]
        for first in range(0, workers * len(spec.roles), workers)
    ]
