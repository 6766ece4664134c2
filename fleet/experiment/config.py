# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/experiments/: which arms, on which load, how often."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fleet.launch.instance_settings import Transfer
from fleet.policies import PolicyError, parameters_of
from fleet.trace.twin import Twin
from lab.config import ConfigError
from lab.records.arm import OUR_PROXY
from lab.records.instances import Role
from lab.serving import vllm_router
from lab.serving.connector import DEFAULT_CONNECTOR

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Workload(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Which part of a trace all arms replay; each cut is a declared departure from it.

    `trace` is a file, from the repository's folder; or `twin` makes up a trace like the
    reference study's (fleet/trace/twin.py), with this many requests and this seed.
    `sessions` whole ones are drawn with the experiment's seed (None: all), of each of
    them the first `max_turns` turns, with answers of at most `max_output_tokens` and
    at most `max_think_s` between a turn and the next. The `copies` of a session have
    blocks of their own, but one time of arrival: in an open loop all of them arrive at
    the same instant.
    """

    trace: str | None = None
    twin: Twin | None = None
    sessions: Count | None = None
    max_turns: Count | None = None
    max_output_tokens: Count | None = None
    max_think_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    copies: Count = 1

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.twin is None):
            raise ValueError("give one of `trace` and `twin`")


class Arm(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is compared. Two arms with equal fields are an A/A pair.

    `router` stands between the replayer and the instances, and decides by its `policy`.
    `parameters` and `cache_state` are for those of fleet.proxy.
    `connector` and `roles` are what instances are launched with, so they need a
    `profile`. `transfer` is in place of the profile's, for --virtual alone.
    `cache_state`: by its own decisions (`mirror`), or by KV events as kvindexd or as
    llm-d's code reads them, the proxy knows what is cached.
    """

    policy: str
    parameters: dict[str, Any] = {}
    router: Literal["fleet.proxy", "vllm-router"] = OUR_PROXY
    connector: str = DEFAULT_CONNECTOR
    roles: list[Role] = []
    cache_state: Literal["mirror", "exact", "llm-d"] = "mirror"
    transfer: Transfer | None = None


class Given(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Instances that somebody else started: `file` names them (fleet/instances.py).

    `restart` is run before every arm, and must leave them started anew, or starting.
    From its start until all of them answer it may take 360 s.
    """

    file: str
    restart: Annotated[list[str], msgspec.Meta(min_length=1)]
    vocab_size: Count = 32_000


class Virtual(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What --virtual goes by besides the profile.

    `host` is a name in configs/hosts/: what engines, connectors and servers take;
    without it they take no time. `scheduling`: whether vLLM schedules a step while the
    one before runs (`async`), as it does on GPUs and cannot on CPUs. `event_delay_ms`:
    how long after a step an arm with exact cache state knows what that cached;
    `event_loss`: the share of the steps of which it learns with a later one.
    """

    host: str | None = None
    scheduling: Literal["sync", "async"] = "sync"
    event_delay_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    event_loss: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


class Experiment(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`concurrency`: requests in flight per instance; each is measured with all arms.

    `profile` is a name in configs/fleet/; `time_factor` multiplies its simulated
    forward: 0.5 is a GPU twice as fast.
    `time_scale` divides the trace's think times, and with `open_loop` its arrival
    times: 20 is twenty times faster. With `open_loop` sessions begin when the trace
    says, and `concurrency` is the most that are in flight: who arrives then waits.
    `standin` takes stand-ins instead of vLLM, with these options of fleet/standin, for
    tests of the experiment itself. `virtual` means something to --virtual alone.
    `replayers` processes send the requests, each those of a share of the sessions, in a
    share of the places; over hosts each is on one of its own.
    """

    summary: str
    workload: Workload
    arms: dict[str, Arm]
    baseline: str
    profile: str | None = None
    given: Given | None = None
    standin: list[str] | None = None
    virtual: Virtual = Virtual()
    instances: Count = 4
    concurrency: list[Count] = msgspec.field(default_factory=lambda: [8])
    open_loop: bool = False
    time_scale: Positive = 1.0
    time_factor: Positive = 1.0
    replayers: Count = 1
    repeats: Count = 2
    seed: int = 0
    request_timeout_s: Positive = 300.0
    lag_budget_ms: Positive = 50.0
    name: str = ""

    def __post_init__(self) -> None:
        sources = (self.profile, self.given, self.standin)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give one of `profile`, `given` and `standin`")
        if self.time_factor != 1 and self.profile is None:
            raise ValueError("`time_factor` is for the forward of a `profile`")
        if self.replayers > self.instances * min(self.concurrency):
            raise ValueError("fewer requests are in flight than there are `replayers`")
        if self.baseline not in self.arms:
            known = ", ".join(self.arms)
            raise ValueError(
                f"`baseline` {self.baseline!r} is no arm; there are {known}"
            )
        for name, arm in self.arms.items():
            if self.profile is None:
                _refuse_launch_settings(name, arm)
            if arm.roles and len(arm.roles) != self.instances:
                raise ValueError(
                    f"arm {name!r} has {len(arm.roles)} `roles` for "
                    f"{self.instances} instances"
                )
            _check_policy(name, arm)


def _check_policy(name: str, arm: Arm) -> None:
    """Raises ValueError if the arm's router does not decide as the arm says."""
    if arm.router == OUR_PROXY:
        try:
            parameters_of(arm.policy, arm.parameters)
        except PolicyError as error:
            raise ValueError(f"arm {name!r}: {error}") from None
        return
    if arm.policy not in vllm_router.POLICIES:
        known = ", ".join(vllm_router.POLICIES)
        raise ValueError(
            f"arm {name!r}: {arm.router} has no policy {arm.policy!r} that runs here; "
            f"there are {known}"
        )
    for field, is_set in (
        ("parameters", bool(arm.parameters)),
        ("cache_state", arm.cache_state != "mirror"),
        ("roles", bool(arm.roles)),
    ):
        if is_set:
            raise ValueError(
                f"arm {name!r}: `{field}` is for {OUR_PROXY}: leave it out, as "
                f"{arm.router} runs with its defaults, on instances that are all alike"
            )


def _refuse_launch_settings(name: str, arm: Arm) -> None:
    """Raises ValueError if the arm has settings of instances launched here."""
    for field, is_set in (
        ("connector", arm.connector != DEFAULT_CONNECTOR),
        ("roles", bool(arm.roles)),
    ):
        if is_set:
            raise ValueError(
                f"arm {name!r}: `{field}` is for the instances of a `profile`: leave "
                "it out, as stand-ins have none and `file` says what `given` ones are"
            )


def read_experiment(path: Path) -> Experiment:
    """Raises ConfigError."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Experiment)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return msgspec.structs.replace(found, name=path.stem)
