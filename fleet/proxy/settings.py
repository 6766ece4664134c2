# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings, and whether the instances can do what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from fleet.policies import BLIND_TO_CACHES, MOVES_KV, parameters_of
from lab.records.instances import Instance


class Settings(msgspec.Struct, frozen=True):
    """`kvindexd`: address of the one that is asked, with `cache` "exact".

    `mirror_tokens`: how many tokens the mirror assumes an instance to hold.
    `tokenizer`: the model's folder, for prompts that come as text or chats.
    `workers`: processes that serve.

    `silence_timeout_s`: how long an instance may send nothing, before its first byte
    and after. `client_timeout_s`: how long a client may take nothing of its stream.
    `prefill_timeout_s`: for an offloaded prefill, where the policy does not say.
    `handover_timeout_s`: from its end to the first byte of the instance that decodes.
    """

    policy: str
    parameters: dict[str, Any] = {}
    cache: Literal["mirror", "exact"] = "mirror"
    kvindexd: str | None = None
    mirror_tokens: int = 500_000
    tokenizer: str | None = None
    max_body_bytes: int = 64 * 2**20
    silence_timeout_s: float = 300.0
    client_timeout_s: float = 60.0
    prefill_timeout_s: float = 60.0
    handover_timeout_s: float = 30.0
    workers: int = 1


class SettingsError(Exception):
    """Instances and settings do not fit together; the message says what to change."""


def resolved(instances: Sequence[Instance], settings: Settings) -> Settings:
    """The settings with all of the policy's parameters.

    Raises SettingsError and PolicyError.
    """
    check(instances, settings)
    parameters = parameters_of(settings.policy, settings.parameters)
    return msgspec.structs.replace(
        settings, parameters=msgspec.structs.asdict(parameters)
    )


def check(instances: Sequence[Instance], settings: Settings) -> None:
    """Raises SettingsError."""
    if settings.workers != 1:
        _check_workers(settings)
    if settings.policy == "direct_read":
        _need(instances, "direct_read", "policy direct_read")
    if settings.policy in MOVES_KV:
        _check_transfer(instances, f"policy {settings.policy}")
    if settings.policy == "pd_sep":
        roles = {one.role for one in instances}
        if not {"prefill", "decode"} <= roles:
            raise SettingsError(
                "policy pd_sep needs instances of role prefill and of role decode "
                f"(--instances FILE); there are {', '.join(sorted(roles))}"
            )


def _check_workers(settings: Settings) -> None:
    if settings.workers < 1:
        raise SettingsError(f"--workers {settings.workers}: at least 1 is needed")
    several = f"--workers {settings.workers}"
    if settings.policy in MOVES_KV:
        raise SettingsError(
            f"{several}: policy {settings.policy} moves KV, which one process has to "
            "keep account of: leave --workers out"
        )
    if settings.kvindexd is None and settings.policy not in BLIND_TO_CACHES:
        raise SettingsError(
            f"{several}: policy {settings.policy} goes by what is cached where, and "
            "each worker would know of its own requests only: give --kvindexd ADDRESS"
        )


def _check_transfer(instances: Sequence[Instance], what: str) -> None:
    kinds = {str(one.connector) for one in instances}
    if kinds not in ({"mooncake"}, {"nixl"}):
        raise SettingsError(
            f"{what} moves KV between instances: all need the connector mooncake, or "
            f"all nixl (--instances FILE); there are {', '.join(sorted(kinds))}"
        )
    if kinds == {"mooncake"}:
        prefilling = [one for one in instances if one.role != "decode"]
        _need(prefilling, "bootstrap_url", f"{what} over Mooncake")


def _need(instances: Sequence[Instance], field: str, what: str) -> None:
    without = [one.name for one in instances if getattr(one, field) is None]
    if without:
        raise SettingsError(
            f"{what} needs `{field}` of every instance (--instances FILE); "
            f"missing for {', '.join(without)}"
        )
