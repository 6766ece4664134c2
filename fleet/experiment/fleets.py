# SPDX-License-Identifier: Apache-2.0
"""A fresh fleet for one run: vLLM here, vLLM elsewhere, or stand-ins."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleet.experiment.config import Arm, Experiment, Given
from fleet.experiment.replayers import ReplayerError, Status, Work
from fleet.instances import InstancesError, read_instances
from fleet.launch.check import CheckError, check_instances, http_text
from fleet.launch.instance_settings import (
    InstanceSettings,
    read_instance_settings,
    slowed,
)
from fleet.launch.launched import (
    LaunchedInstance,
    Workshop,
    check_alive,
    launched,
    wait_ready,
)
from fleet.launch.spec import FleetSpec, SpecError
from fleet.standin.process import standin
from lab.paths import CONFIGS
from lab.records import RecordsError
from lab.records.arm import FleetHost
from lab.records.exposition import cache_config
from lab.records.instances import Instance
from lab.serving import preflight
from lab.serving.connector import load_connector
from lab.serving.kvindexd import KVINDEXD, LLMD_LOOKUP
from lab.serving.ports import LOOPBACK, PortsError
from lab.serving.server import READY_DEADLINE_S, ServerError

# What follows the instances' KV events, by an arm's `cache_state`.
INDEXES = {"exact": KVINDEXD, "llm-d": LLMD_LOOKUP}
# fleet/standin takes any token id.
STANDIN_VOCABULARY = 32_000
# What a fleet can fail with.
FLEET_ERRORS = (
    ReplayerError,
    RecordsError,
    CheckError,
    InstancesError,
    PortsError,
    ServerError,
    SpecError,
    *preflight.CONFIG_ERRORS,
)


def _alive() -> None:
    """Instances that were not started here cannot be watched."""


@dataclass(frozen=True)
class Fleet:
    """The instances that a run sends its requests to.

    `folders` are where those that were started keep their log and records: whole once
    they have ended. `check_alive` raises ServerError or HostLost if one has ended.
    `under_load` is the context in which requests are sent. Over several hosts, `hosts`
    is filled in as the fleet ends, `survivors` and `gpu_used_mib` were there before it
    began, they reach the proxy at `address`, and `replaying` is in place of
    replaying_here.
    """

    instances: list[Instance]
    vocab_size: int
    ready_s: float
    folders: dict[str, Path] = field(default_factory=dict)
    patches: dict[str, str] = field(default_factory=dict)
    check_alive: Callable[[], None] = _alive
    peak_rss_mib: Callable[[], dict[str, float]] = dict
    under_load: Callable[[], AbstractContextManager[None]] = nullcontext
    hosts: list[FleetHost] = field(default_factory=list)
    survivors: list[int] = field(default_factory=list)
    gpu_used_mib: list[int] | None = None
    address: str = LOOPBACK
    replaying: Callable[[list[Work], Path], AbstractContextManager[Status]] | None = (
        None
    )

    @property
    def cache_tokens(self) -> int | None:
        """What the smallest cache holds; None where one is not known."""
        held = [one.kv_tokens for one in self.instances]
        return None if None in held else min(held)


@contextmanager
def fresh_fleet(
    experiment: Experiment, arm: Arm, workshop: Workshop, folder: Path
) -> Iterator[Fleet]:
    """A fleet that answers; what was started for it is stopped on leaving.

    Logs and records go to `folder`. Raises what launching does, CheckError.
    """
    if experiment.standin is not None:
        with _standins(experiment.instances, experiment.standin) as fleet:
            yield fleet
    elif experiment.given is not None:
        yield _restarted(experiment.given, experiment.instances)
    else:
        with _launched(experiment, arm, workshop, folder) as fleet:
            yield fleet


def instance_settings(experiment: Experiment) -> InstanceSettings:
    """Of the experiment's `profile`. Raises ConfigError."""
    path = CONFIGS / "fleet" / f"{experiment.profile}.toml"
    return slowed(read_instance_settings(path), experiment.time_factor)


def spec(experiment: Experiment, arm: Arm) -> FleetSpec:
    """What an arm's instances are launched as. Raises ConfigError."""
    return FleetSpec(
        instance_settings(experiment),
        arm.connector,
        load_connector(arm.connector),
        arm.roles or ["both"] * experiment.instances,
        kv_events=arm.cache_state in INDEXES,
    )


@contextmanager
def _launched(
    experiment: Experiment, arm: Arm, workshop: Workshop, folder: Path
) -> Iterator[Fleet]:
    wanted = spec(experiment, arm).recording_requests()
    preflight.check_connector(wanted.connector)
    with launched(wanted, workshop, folder) as servers:
        ready_s = wait_ready(servers)
        held = [kv_tokens(wanted.settings, server) for server in servers]
        yield Fleet(
            instances=[
                msgspec.structs.replace(server.instance, kv_tokens=tokens)
                for server, tokens in zip(servers, held, strict=True)
            ],
            vocab_size=workshop.checkpoint(wanted.settings).vocab_size,
            ready_s=ready_s,
            folders={each.instance.name: each.folder for each in servers},
            patches=workshop.tree(wanted)[1],
            check_alive=lambda: check_alive(servers),
            peak_rss_mib=lambda: {
                each.instance.name: each.server.peak_rss_mib() for each in servers
            },
        )


def kv_tokens(settings: InstanceSettings, server: LaunchedInstance) -> int | None:
    """How much an instance can cache, None if vLLM does not tell.

    Raises CheckError if it does not answer.
    """
    told = cache_config(http_text(f"{server.instance.url}/metrics"))
    blocks = told.get("num_gpu_blocks")
    if blocks is None:
        return None
    return blocks * settings.block_size * settings.data_parallel


@contextmanager
def _standins(count: int, options: list[str]) -> Iterator[Fleet]:
    began = time.monotonic()
    with ExitStack() as stack:
        urls = [stack.enter_context(standin(*options)).url for _ in range(count)]
        instances = [Instance(f"i{index}", url) for index, url in enumerate(urls)]
        yield Fleet(instances, STANDIN_VOCABULARY, time.monotonic() - began)


def _restarted(given: Given, count: int) -> Fleet:
    """Raises CheckError, InstancesError."""
    began = time.monotonic()
    _restart(given.restart)
    instances = read_instances(Path(given.file))
    if len(instances) != count:
        raise CheckError(
            f"{given.file} names {len(instances)} instances where the experiment has "
            f"`instances = {count}`: make the two agree"
        )
    while True:
        try:
            check_instances(instances)
        except CheckError:
            if time.monotonic() - began > READY_DEADLINE_S:
                raise
            time.sleep(1)
        else:
            return Fleet(instances, given.vocab_size, time.monotonic() - began)


def _restart(command: list[str]) -> None:
    """Raises CheckError if it cannot be run, fails or takes longer than a start."""
    named = f"`restart` ({shlex.join(command)})"
    # A file, no pipe: servers that it leaves in the background would hold that open.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=READY_DEADLINE_S,
            ).returncode
        except OSError as error:
            raise CheckError(f"{named} cannot be run: {error}") from None
        except subprocess.TimeoutExpired:
            raise CheckError(
                f"{named} did not end within {READY_DEADLINE_S:.0f} s: it must leave "
                "the servers starting, not wait for their end"
            ) from None
        if status != 0:
            said.seek(0)
            end = said.read()[-2000:]
            raise CheckError(f"{named} ended with status {status}:\n{end}")
