# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/experiments/: arms, load, instances, repeats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from kvtax.config import ConfigError, decode_toml
from kvtax.engine.connector import DEFAULT_CONNECTOR, load_connector
from kvtax.proc.ports import MOST_SERVERS

from kvtax_fleet.launch.instance_settings import (
    InstanceSettings,
    Transfer,
    read_instance_settings,
    slowed,
)
from kvtax_fleet.launch.spec import HANDED_OVER, FleetSpec, SpecError, check_spec
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.policies import POLICIES, PolicyError, parameters_of
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance, Role
from kvtax_fleet.replay.options import Options

# Distance between the block ids of two copies. Traces count ids up from 0, in sessions
# of 2^32 at most; ids are below 2^63.
ID_STRIDE = 2**53
MOST_COPIES = 2**63 // ID_STRIDE

Count = Annotated[int, msgspec.Meta(ge=1)]
# So many runs or requests are beyond any machine.
Few = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
# As kvtax_fleet.replay.options.
AtLeast = Annotated[float, msgspec.Meta(ge=0.001)]
# An arm's name is in the names of folders.
ARM_NAME = re.compile(r"[\w+-][\w.+-]{0,99}")


class Workload(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The part of a trace that all arms replay; each cut is a declared departure.

    `trace` is a file below fleet/. Of its first `requests` (None: all), `sessions`
    whole sessions are drawn with the experiment's seed (None: all). Each is cut to its
    first `max_turns` turns, to answers of at most `max_output_tokens` and to at most
    `max_think_s` between a turn and the next. The `copies` of a session have blocks of
    their own, but one time of arrival: in an open loop all of them arrive at the same
    instant.
    """

    trace: str
    requests: Count | None = None
    sessions: Count | None = None
    max_turns: Count | None = None
    max_output_tokens: Count | None = None
    max_think_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    copies: Annotated[int, msgspec.Meta(ge=1, le=MOST_COPIES)] = 1


class Arm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One side of a comparison. Two arms with equal fields are an A/A pair.

    The proxy decides by `policy`. Instances are launched with `connector` and `roles`.
    `transfer` replaces the profile's, for --virtual alone. `cache_state` is how the
    proxy knows which blocks are cached: by its own decisions (`mirror`), or, with
    --virtual, by the engines' own state (`exact`).
    """

    policy: str
    parameters: dict[str, Any] = {}
    connector: str = DEFAULT_CONNECTOR
    roles: list[Role] = []
    cache_state: Literal["mirror", "exact"] = "mirror"
    transfer: Transfer | None = None


class Virtual(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Settings of virtual time besides the profile.

    `host` is a name in configs/hosts/: the times that engines, connectors and servers
    take; without it they take none. `scheduling`: whether vLLM schedules a step while
    the step before runs (`async`), as it does on GPUs and cannot on CPUs.
    """

    host: str | None = None
    scheduling: Literal["sync", "async"] = "sync"


class Experiment(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An experiment: arms, load and instances.

    All arms are measured at each `concurrency`, the requests in flight per instance.
    `profile` is a name in configs/profiles/; `time_factor` multiplies its simulated
    forward: 0.5 is a GPU twice as fast. `time_scale` divides the trace's think times,
    and with `open_loop` its arrival times: 20 is twenty times faster. With `open_loop`
    sessions begin at the trace's times, and `concurrency` is the most that are in
    flight: further sessions wait; `trace_times` is the replay's. `virtual` is for
    --virtual alone.
    """

    summary: str
    workload: Workload
    arms: dict[str, Arm]
    baseline: str
    profile: str
    virtual: Virtual = Virtual()
    instances: Annotated[int, msgspec.Meta(ge=1, le=MOST_SERVERS)] = 4
    concurrency: Annotated[list[Few], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [8]
    )
    open_loop: bool = False
    trace_times: bool = False
    time_scale: AtLeast = 1.0
    time_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    repeats: Few = 2
    seed: int = 0
    request_timeout_s: AtLeast = 300.0
    lag_budget_ms: AtLeast = 50.0
    name: str = ""

    @property
    def instance_settings(self) -> InstanceSettings:
        """Settings of the `profile`. Raises ConfigError."""
        path = CONFIGS / "profiles" / f"{self.profile}.toml"
        return slowed(read_instance_settings(path), self.time_factor)

    def transfer(self, arm: Arm) -> Transfer | None:
        """Return how KV moves in an arm, in virtual time. Raises ConfigError."""
        return arm.transfer or self.instance_settings.transfer

    def fleet_spec(self, arm: Arm) -> FleetSpec:
        """Compute how an arm's instances are launched. Raises ConfigError."""
        return FleetSpec(
            self.instance_settings,
            arm.connector,
            load_connector(arm.connector),
            arm.roles or ["both"] * self.instances,
        )

    def __post_init__(self) -> None:
        if self.trace_times and not self.open_loop:
            raise ValueError("`trace_times` needs `open_loop`")
        if self.baseline not in self.arms:
            known = ", ".join(self.arms)
            raise ValueError(
                f"`baseline` {self.baseline!r} is no arm; there are {known}"
            )
        if len({*self.concurrency}) < len(self.concurrency):
            raise ValueError("`concurrency` has a number twice")
        for name, arm in self.arms.items():
            if not ARM_NAME.fullmatch(name):
                raise ValueError(
                    f"arm {name!r}: give it a name of letters, digits and -_+., as "
                    "its folder has"
                )
            if arm.roles and len(arm.roles) != self.instances:
                raise ValueError(
                    f"arm {name!r} has {len(arm.roles)} `roles` for "
                    f"{self.instances} instances"
                )
            try:
                parameters_of(arm.policy, arm.parameters)
            except PolicyError as error:
                raise ValueError(f"arm {name!r}: {error}") from None


def check_arms(experiment: Experiment) -> None:
    """Raise ConfigError if launched instances lack what an arm's policy needs."""
    for name, arm in experiment.arms.items():
        wanted = experiment.fleet_spec(arm)
        try:
            check_spec(wanted)
        except SpecError as error:
            raise ConfigError(f"arm {name!r}: {error}") from None
        if {*wanted.roles} == {"prefill"}:
            raise ConfigError(f"arm {name!r}: no instance has a role that answers")
        policy = POLICIES[arm.policy]
        needs = f"arm {name!r}: policy {arm.policy} needs"
        if policy.moves_kv and wanted.connector.transfer not in HANDED_OVER:
            raise ConfigError(
                f"{needs} a `connector` that moves KV as Mooncake and NIXL do, such as "
                "mooncake_both_fixed"
            )
        if policy.needs_pools and not {"prefill", "decode"} <= set(wanted.roles):
            raise ConfigError(f"{needs} instances of both `roles`, prefill and decode")


def read_experiment(path: Path) -> Experiment:
    """Read an experiment's TOML file. Raises ConfigError."""
    try:
        experiment = decode_toml(path, path.read_bytes(), Experiment)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return msgspec.structs.replace(experiment, name=path.stem)


def proxy_settings(arm: Arm, instances: Sequence[Instance]) -> Settings:
    """Return the arm's settings: the mirror holds as much as the smallest cache."""
    settings = Settings(policy=arm.policy, parameters=arm.parameters)
    held = [each.kv_tokens for each in instances]
    known = [tokens for tokens in held if tokens is not None]
    if len(known) < len(held):
        return settings
    return msgspec.structs.replace(settings, mirror_tokens=min(known))


def replay_options(
    experiment: Experiment, concurrency: int, url: str, trace: str, vocab_size: int
) -> Options:
    """Return the options of a replay with so many sessions for each instance."""
    return Options(
        url=url,
        trace=trace,
        vocab_size=vocab_size,
        time_scale=experiment.time_scale,
        max_inflight_sessions=concurrency * experiment.instances,
        closed_loop=not experiment.open_loop,
        trace_times=experiment.trace_times,
        timeout_s=experiment.request_timeout_s,
        lag_budget_ms=experiment.lag_budget_ms,
    )
