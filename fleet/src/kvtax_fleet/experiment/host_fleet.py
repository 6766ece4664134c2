# SPDX-License-Identifier: Apache-2.0
"""One host's part of a fleet: its instances, its replayers, and how busy it was.

The host of the command asks for work by tasks. They are the same for its own part,
which is called directly, and for parts on other hosts, which get them over the network
(fleet_worker.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from kvtax.engine import preflight
from kvtax.engine.errors import ServerError
from kvtax.engine.server import READY_DEADLINE_S
from kvtax.proc.ports import PortsError
from kvtax.proc.supervise import descendants
from kvtax.records import RecordsError

from kvtax_fleet.experiment.config import Arm, Experiment, Given
from kvtax_fleet.experiment.freshness import gpu_used_mib
from kvtax_fleet.experiment.machine import (
    CpuSampler,
    engine_lags,
    gpu_sampler,
    machine_load,
)
from kvtax_fleet.experiment.replayers import (
    Replayer,
    ReplayerError,
    Work,
    share_folder,
    worst,
)
from kvtax_fleet.instances import InstancesError, read_instances
from kvtax_fleet.launch.launched import (
    CheckError,
    LaunchedInstance,
    Workshop,
    check_alive,
    check_instances,
    http_text,
    launched,
)
from kvtax_fleet.launch.spec import SpecError
from kvtax_fleet.records.arm import MachineLoad
from kvtax_fleet.records.exposition import cache_config
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.standin.process import Standin, standin

# kvtax_fleet/standin takes any token id.
STANDIN_VOCABULARY = 32_000
# Errors by which a host's part of a run fails.
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


class Start(msgspec.Struct, tag=True, frozen=True):
    """Begin to start these instances of the arm's fleet, on the address `host`."""

    arm: Arm
    numbers: list[int]
    host: str


class Watch(msgspec.Struct, tag=True, frozen=True):
    """Report the state; with `memory` also the peak memory of the instances."""

    memory: bool = False


class Load(msgspec.Struct, tag=True, frozen=True):
    """Begin or end to sample how busy the host is: requests are about to come."""

    begins: bool


class Replay(msgspec.Struct, tag=True, frozen=True):
    """Start a replayer; with the `trace` file's content if the host lacks it."""

    work: Work
    trace: bytes | None = None


class Go(msgspec.Struct, tag=True, frozen=True):
    """Let the waiting replayers begin at this time of the host's clock."""

    start_ns: int


class End(msgspec.Struct, tag=True, frozen=True):
    """Stop everything.

    With clock `readings` (kvtax.hosts.clock) convert the times in the records to that
    clock, and put `boot_id` into their headers.
    """

    readings: list[Any] = []
    boot_id: str | None = None


class Started(msgspec.Struct, tag=True, frozen=True):
    """Facts from before the start. `survivors` is None if nothing is started here."""

    vocab_size: int = 0
    patches: dict[str, str] = {}
    survivors: list[int] | None = None
    gpu_used_mib: list[int] | None = None


class Seen(msgspec.Struct, tag=True, frozen=True):
    """State of a part: `instances` once all answer, `replayer_status` at the end."""

    instances: list[Instance] | None = None
    peak_rss_mib: dict[str, float] = {}
    replayers_ready: bool = False
    replayer_status: int | None = None


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The end of a part, with its load; None if no request was sent."""

    machine: MachineLoad | None


class Done(msgspec.Struct, tag=True, frozen=True):
    """A task without a result is done."""


Task = Start | Watch | Load | Replay | Go | End
Answer = Started | Seen | Ended | Done


class HostFleet:
    """The part of a fleet on this host, with its files in `folder`.

    Its methods raise FLEET_ERRORS and ConfigError.
    """

    def __init__(
        self, experiment: Experiment, workshop: Workshop, trace: Path, folder: Path
    ) -> None:
        self._experiment = experiment
        self._workshop = workshop
        self._trace = trace
        self._stack = ExitStack()
        self._sampling = ExitStack()
        self._cpu: CpuSampler | None = None
        self._servers: list[LaunchedInstance] = []
        self._standins: dict[str, Standin] = {}
        self._instances: list[Instance] | None = None
        self._given: list[Instance] = []
        self._deadline_s = 0.0
        self._replayers: list[Replayer] = []
        self.folder = folder

    @property
    def instances(self) -> Path:
        """The folder with a folder for each instance: its log and records."""
        return self.folder / "instances"

    def room(self) -> int:
        """Compute how many instances this host has room for: all, if stand-ins."""
        most = self._experiment.instances
        if self._experiment.profile is None:
            return most
        settings = self._experiment.instance_settings
        for count in range(1, most + 1):
            if next(preflight.resource_problems(settings, count), None):
                return count - 1
        return most

    def do(self, task: Task) -> Answer:
        """Do a task and return its answer."""
        match task:
            case Start(arm, numbers, host):
                return self._start(arm, numbers, host)
            case Watch(memory):
                return self._watch(memory)
            case Load(begins):
                self._sample() if begins else self._sampling.close()
            case Replay(work, trace):
                self._replay(work, trace)
            case Go(start_ns):
                for replayer in self._replayers:
                    replayer.gate.open(start_ns)
            case End():
                self.stop()
                return Ended(self._machine())
        return Done()

    def stop(self) -> None:
        """End everything that runs."""
        self._sampling.close()
        self._stack.close()
        self._servers, self._standins, self._replayers = [], {}, []

    def _start(self, arm: Arm, numbers: list[int], host: str) -> Started:
        self.stop()
        self._cpu, self._instances = None, None
        shutil.rmtree(self.instances, ignore_errors=True)
        self._deadline_s = time.monotonic() + READY_DEADLINE_S
        if self._experiment.given is not None and numbers:
            return self._restart(self._experiment.given)
        # Orphaned descendants become children of this process (kvtax.proc.supervise).
        survivors = descendants(os.getpid())
        if not numbers:
            self._instances = []
            return Started(survivors=survivors)
        if self._experiment.standin is not None:
            options = ["--host", host, *self._experiment.standin]
            for number in numbers:
                started = self._stack.enter_context(standin(*options))
                self._standins[f"i{number}"] = started
            self._instances = [
                Instance(name, started.url) for name, started in self._standins.items()
            ]
            return Started(STANDIN_VOCABULARY, survivors=survivors)
        whole = self._experiment.fleet_spec(arm)
        roles = [whole.roles[number] for number in numbers]
        spec = replace(whole, roles=roles, numbers=numbers)
        preflight.check_connector(spec.connector)
        used_mib = None
        if spec.settings.flavour == "gpu":
            used_mib = gpu_used_mib(len(numbers) * spec.settings.workers)
        vocab_size = self._workshop.checkpoint(spec.settings).vocab_size
        patches = self._workshop.overlay(spec)[1]
        fleet = launched(spec, self._workshop, self.instances, host=host)
        self._servers = self._stack.enter_context(fleet)
        return Started(vocab_size, patches, survivors, used_mib)

    def _restart(self, given: Given) -> Started:
        _run_restart(given.restart)
        self._given = read_instances(Path(given.file))
        count = self._experiment.instances
        if len(self._given) != count:
            raise CheckError(
                f"{given.file} names {len(self._given)} instances where the experiment "
                f"has `instances = {count}`: make the two agree"
            )
        return Started(given.vocab_size)

    def _watch(self, memory: bool) -> Seen:
        check_alive(self._servers)
        for name, started in self._standins.items():
            if (status := started.process.poll()) is not None:
                raise ServerError(f"{name} ended with status {status}")
        # Instances under load get no requests of ours: only until they are ready.
        if self._instances is None:
            self._instances = self._ready()
        statuses = [replayer.status() for replayer in self._replayers]
        servers = self._servers if memory else []
        return Seen(
            self._instances,
            {one.instance.name: one.server.peak_rss_mib() for one in servers},
            all(replayer.gate.ready for replayer in self._replayers),
            worst(statuses) if statuses else None,
        )

    def _ready(self) -> list[Instance] | None:
        """Return the instances, None while one of them does not answer."""
        if self._experiment.given is not None:
            try:
                check_instances(self._given)
            except CheckError:
                if time.monotonic() > self._deadline_s:
                    raise
                return None
            return self._given
        if not all(each.server.is_ready() for each in self._servers):
            return None
        settings = self._experiment.instance_settings
        engines = settings.block_size * settings.data_parallel
        return [
            msgspec.structs.replace(
                each.instance, kv_tokens=_kv_tokens(each.instance.url, engines)
            )
            for each in self._servers
        ]

    def _replay(self, work: Work, trace: bytes | None) -> None:
        if trace is not None:
            self._trace.write_bytes(trace)
        own = share_folder(self.folder, work)
        replayer = Replayer(self._experiment, self._trace, work, own)
        self._replayers.append(replayer)
        self._stack.callback(replayer.stop)

    def _sample(self) -> None:
        if self._instances:
            self._sampling.enter_context(gpu_sampler(self.folder / "gpu.csv"))
        self._cpu = self._sampling.enter_context(CpuSampler())

    def _machine(self) -> MachineLoad | None:
        """Compute whether the host kept up, once all has ended."""
        if self._cpu is None:
            return None
        folders = sorted(self.instances.iterdir()) if self.instances.exists() else ()
        lags = engine_lags({path.name: path for path in folders})
        return machine_load(self._cpu, os.cpu_count() or 1, lags)


def _kv_tokens(url: str, tokens_per_block: int) -> int | None:
    """Compute how many tokens an instance can cache, None if vLLM does not report it.

    Raises CheckError if the instance does not answer.
    """
    blocks = cache_config(http_text(f"{url}/metrics")).get("num_gpu_blocks")
    return None if blocks is None else blocks * tokens_per_block


def _run_restart(command: list[str]) -> None:
    """Run a `restart` command. Raises CheckError if it fails or takes too long."""
    named = f"`restart` ({shlex.join(command)})"
    # A file, no pipe: servers that it leaves in the background would hold that open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
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
            output.seek(0)
            end = output.read()[-2000:]
            raise CheckError(f"{named} ended with status {status}:\n{end}")
