# SPDX-License-Identifier: Apache-2.0
"""The instances of a fleet that one of its hosts has, and what that host can say."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from fleet.experiment.config import Arm, Experiment
from fleet.experiment.fleets import (
    STANDIN_VOCABULARY,
    instance_settings,
    kv_tokens,
    spec,
)
from fleet.experiment.freshness import gpu_used_mib
from fleet.experiment.machine import (
    CpuSampler,
    engine_lags,
    gpu_sampler,
    machine_load,
)
from fleet.experiment.replayers import Replayer, Work, share_folder
from fleet.launch.launched import LaunchedInstance, Workshop, check_alive, launched
from fleet.standin.process import Standin, standin
from lab.records.arm import MachineLoad
from lab.records.instances import Instance
from lab.serving import preflight
from lab.serving.errors import ServerError
from lab.serving.supervise import descendants


class PartFacts(msgspec.Struct, frozen=True):
    """What is known of a host's part once all of its instances answer."""

    instances: list[Instance]
    vocab_size: int
    patches: dict[str, str]
    survivors: list[int]
    gpu_used_mib: list[int] | None


class Part:
    """Starts what is asked of it, in `folder`, and ends it with what it has recorded.

    Its methods raise what launching does, and CheckError.
    """

    def __init__(
        self, experiment: Experiment, workshop: Workshop, folder: Path
    ) -> None:
        self._experiment = experiment
        self._workshop = workshop
        self.folder = folder
        self._stack = ExitStack()
        self._load = ExitStack()
        self._cpu: CpuSampler | None = None
        self._servers: list[LaunchedInstance] = []
        self._standins: dict[str, Standin] = {}
        self._facts: PartFacts | None = None
        self.replayer: Replayer | None = None

    @property
    def instances(self) -> Path:
        """Where each instance has a folder with its log and records."""
        return self.folder / "instances"

    def room(self) -> int:
        """How many instances this host has room for; a stand-in takes next to none."""
        most = self._experiment.instances
        if self._experiment.profile is None:
            return most
        settings = instance_settings(self._experiment)
        for count in range(1, most + 1):
            if next(preflight.resource_problems(settings, count), None):
                return count - 1
        return most

    def start(self, arm: Arm, numbers: list[int], host: str) -> None:
        """Begin to start instances of these numbers; they listen on `host`."""
        self.stop()
        self._cpu = None
        shutil.rmtree(self.folder, ignore_errors=True)
        self.instances.mkdir(parents=True)
        survivors = descendants(os.getpid())
        if self._experiment.standin is not None:
            options = ["--host", host, *self._experiment.standin]
            self._standins = {
                f"i{number}": self._stack.enter_context(standin(*options))
                for number in numbers
            }
            made = [Instance(name, one.url) for name, one in self._standins.items()]
            self._facts = PartFacts(made, STANDIN_VOCABULARY, {}, survivors, None)
            return
        if not numbers:
            self._facts = PartFacts([], 0, {}, survivors, None)
            return
        whole = spec(self._experiment, arm).recording_requests()
        wanted = replace(
            whole, roles=[whole.roles[number] for number in numbers], numbers=numbers
        )
        preflight.check_connector(wanted.connector)
        preflight.check_resources(wanted.settings, len(numbers))
        used_mib = None
        if wanted.settings.flavour == "gpu":
            used_mib = gpu_used_mib(len(numbers) * wanted.settings.workers)
        vocab_size = self._workshop.checkpoint(wanted.settings).vocab_size
        patches = self._workshop.tree(wanted)[1]
        self._facts = PartFacts([], vocab_size, patches, survivors, used_mib)
        fleet = launched(wanted, self._workshop, self.instances, host=host)
        self._servers = self._stack.enter_context(fleet)

    def ready(self) -> PartFacts | None:
        """None while an instance does not answer yet."""
        self.check_alive()
        # Under load nobody asks the servers.
        if self._facts.instances or not self._servers:
            return self._facts
        if not all(each.server.is_ready() for each in self._servers):
            return None
        settings = instance_settings(self._experiment)
        told = [
            msgspec.structs.replace(each.instance, kv_tokens=kv_tokens(settings, each))
            for each in self._servers
        ]
        self._facts = msgspec.structs.replace(self._facts, instances=told)
        return self._facts

    def check_alive(self) -> None:
        """Raises ServerError if an instance has ended."""
        check_alive(self._servers)
        for name, one in self._standins.items():
            if (status := one.process.poll()) is not None:
                raise ServerError(f"{name} ended with status {status}")

    def replay(self, work: Work, trace: bytes) -> None:
        """Begin a replayer of the trace file with this content."""
        path = self.folder.with_name("trace.jsonl.gz")
        path.write_bytes(trace)
        own = share_folder(self.folder, work)
        self.replayer = Replayer(self._experiment, path, work, own)
        self._stack.callback(self.replayer.stop)

    def begin_load(self) -> None:
        """From here on, to the end, the host is watched."""
        self._load.enter_context(gpu_sampler(self.folder))
        self._cpu = self._load.enter_context(CpuSampler())

    def peak_rss_mib(self) -> dict[str, float]:
        """By instance."""
        return {
            each.instance.name: each.server.peak_rss_mib() for each in self._servers
        }

    def machine(self) -> MachineLoad | None:
        """Whether the host kept up, once all has ended; None if there was no load.

        Raises RecordsError.
        """
        if self._cpu is None:
            return None
        lags = engine_lags({path.name: path for path in self.instances.iterdir()})
        return machine_load(self._cpu, os.cpu_count() or 1, lags)

    def stop(self) -> None:
        """End whatever runs."""
        self._load.close()
        self._stack.close()
        self._servers, self._standins, self.replayer = [], {}, None
