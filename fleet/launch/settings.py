# SPDX-License-Identifier: Apache-2.0
"""What one instance of a fleet is told: settings of its own on those all share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleet.instances import Address, ConnectorKind, Instance, Role
from fleet.launch.ports import Ports
from fleet.launch.profile import FleetProfile
from lab.serving.connector import Connector

KV_ROLES: dict[Role, str] = {
    "both": "kv_both",
    "prefill": "kv_producer",
    "decode": "kv_consumer",
}
KINDS: dict[str, ConnectorKind] = {
    "NoopConnector": "noop",
    "MooncakeConnector": "mooncake",
    "NixlConnector": "nixl",
    "DirectReadConnector": "direct_read",
}


class SettingsError(Exception):
    """A fleet was asked for that cannot work; the message says why."""


@dataclass(frozen=True)
class Spec:
    """A fleet to be launched on this machine: an instance for each of `roles`."""

    profile: FleetProfile
    connector_name: str
    connector: Connector
    roles: list[Role] = field(default_factory=lambda: ["both"])
    kv_events: bool = False

    @property
    def kind(self) -> ConnectorKind | None:
        transfer = self.connector.kv_transfer_config
        if transfer is None:
            return None
        if (name := transfer["kv_connector"]) not in KINDS:
            known = ", ".join(KINDS)
            raise SettingsError(f"a fleet knows no connector {name}; it knows {known}")
        return KINDS[name]


def instance(spec: Spec, index: int, ports: Ports, sockets: Path) -> Instance:
    """The instance as its clients see it; ZMQ's sockets are in the folder `sockets`."""
    kind = spec.kind
    role = spec.roles[index]
    if role != "both" and kind not in ("mooncake", "nixl"):
        raise SettingsError(
            f"role {role} needs a connector that moves KV, not {spec.connector_name}"
        )
    bootstrap = f"http://127.0.0.1:{ports.bootstrap}"
    events = f"ipc://{sockets}/{index}"
    return Instance(
        name=f"i{index}",
        url=f"http://127.0.0.1:{ports.http}",
        role=role,
        connector=kind,
        # Only who sends KV has one.
        bootstrap_url=bootstrap if kind == "mooncake" and role != "decode" else None,
        direct_read=(
            Address("127.0.0.1", ports.direct_read) if kind == "direct_read" else None
        ),
        kv_events=events if spec.kv_events else None,
        kv_events_replay=f"{events}.replay" if spec.kv_events else None,
        block_tokens=spec.profile.block_size,
    )


def own_profile(
    spec: Spec, index: int, made: Instance, ports: Ports, env: dict[str, str]
) -> FleetProfile:
    """The profile with what only this instance is told; a GPU is its own."""
    arguments = [*spec.profile.server_args, "--enable-prompt-tokens-details"]
    if made.kv_events:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": made.kv_events,
            "replay_endpoint": made.kv_events_replay,
        }
        arguments += ["--kv-events-config", json.dumps(events)]
    env = env | {"VLLM_PORT": str(ports.vllm_internal)}
    if spec.profile.flavour == "gpu":
        env["CUDA_VISIBLE_DEVICES"] = str(index)
    return msgspec.structs.replace(
        spec.profile,
        server_args=arguments,
        server_env=spec.profile.server_env | env,
    )


def own_connector(spec: Spec, made: Instance) -> Connector:
    """The connector with the instance's role and address."""
    shared = spec.connector.kv_transfer_config
    if shared is None:
        return spec.connector
    own = {"kv_role": KV_ROLES[made.role]}
    if made.direct_read:
        extra = shared.get("kv_connector_extra_config", {})
        own["kv_connector_extra_config"] = extra | msgspec.to_builtins(made.direct_read)
    return msgspec.structs.replace(spec.connector, kv_transfer_config=shared | own)
