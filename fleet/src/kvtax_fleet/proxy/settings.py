# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings, and whether the instances fit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvtax_fleet.policies import POLICIES, parameters_of
from kvtax_fleet.records.decisions import DecisionsHeader
from kvtax_fleet.records.instances import Instance


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a proxy. Fields with a description are options of the command."""

    policy: Annotated[
        str, Meta(description=f"how to route requests: {', '.join(POLICIES)}")
    ]
    parameters: dict[str, Any] = {}
    cache: Literal["mirror", "exact"] = "mirror"
    # Tokens that the mirror assumes an instance to hold.
    mirror_tokens: Annotated[int, Meta(ge=1)] = 500_000
    max_body_bytes: Annotated[
        int, Meta(ge=1, description="a longer request body is answered with 413")
    ] = 64 * 2**20
    silence_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            description="seconds an instance may send nothing of an answer that has "
            "begun, or is to be a stream; also for requests to wait where all are out",
        ),
    ] = 300.0
    # Seconds for an offloaded prefill, if the policy has none.
    prefill_timeout_s: Annotated[float, Meta(ge=0.001)] = 60.0
    # Seconds from an offloaded prefill to the first byte.
    handover_timeout_s: Annotated[float, Meta(ge=0.001)] = 30.0


class SettingsError(Exception):
    """Instances and settings do not fit together; the message says what to change."""

    exit_code = 2


def resolved(instances: Sequence[Instance], settings: Settings) -> Settings:
    """Return the settings with all of the policy's parameters.

    Raises SettingsError and PolicyError.
    """
    parameters = parameters_of(settings.policy, settings.parameters)
    check(instances, settings)
    return msgspec.structs.replace(
        settings, parameters=msgspec.structs.asdict(parameters)
    )


def header_of(settings: Settings, instances: Sequence[Instance]) -> DecisionsHeader:
    """Make the header of a decision log."""
    others = msgspec.structs.asdict(settings)
    policy, parameters = others.pop("policy"), others.pop("parameters")
    return DecisionsHeader(
        policy=policy,
        parameters=parameters,
        settings=others,
        instances=list(instances),
    )


def check(instances: Sequence[Instance], settings: Settings) -> None:
    """Raise SettingsError if instances and settings do not fit together."""
    policy = POLICIES[settings.policy]
    if policy.moves_kv:
        _check_transfer(instances, f"policy {settings.policy}")
    if policy.needs_pools:
        roles = {instance.role for instance in instances}
        if not {"prefill", "decode"} <= roles:
            raise SettingsError(
                f"policy {settings.policy} needs instances of role prefill and of role "
                f"decode (--instances FILE); there are {', '.join(sorted(roles))}"
            )


def _check_transfer(instances: Sequence[Instance], what: str) -> None:
    kinds = {str(instance.connector) for instance in instances}
    if kinds not in ({"mooncake"}, {"nixl"}):
        raise SettingsError(
            f"{what} moves KV between instances: all need the connector mooncake, or "
            f"all nixl (--instances FILE); there are {', '.join(sorted(kinds))}"
        )
    if kinds == {"mooncake"}:
        prefilling = [instance for instance in instances if instance.role != "decode"]
        _need(prefilling, "bootstrap_url", f"{what} over Mooncake")


def _need(instances: Sequence[Instance], field: str, what: str) -> None:
    without = [
        instance.name for instance in instances if getattr(instance, field) is None
    ]
    if without:
        raise SettingsError(
            f"{what} needs `{field}` of every instance (--instances FILE); "
            f"missing for {', '.join(without)}"
        )
