# SPDX-License-Identifier: Apache-2.0
"""A fresh fleet on this machine for one run: started, watched, ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from kvtax.engine import ServerError, preflight
from kvtax.engine.preloaded import zygote_pids
from kvtax.engine.server import READY_DEADLINE_S
from kvtax.proc.ports import PortsError
from kvtax.proc.supervise import descendants
from kvtax.records import RecordsError

from kvtax_fleet.experiment.config import Arm, Experiment
from kvtax_fleet.experiment.freshness import gpu_used_mib
from kvtax_fleet.experiment.machine import (
    CoreTimes,
    engine_lags,
    gpu_sampler,
    machine_load,
)
from kvtax_fleet.instances import InstancesError
from kvtax_fleet.launch.launched import (
    LaunchedInstance,
    NoAnswer,
    Workshop,
    check_alive,
    http_text,
    launched,
)
from kvtax_fleet.launch.spec import SpecError
from kvtax_fleet.records.arm import MachineLoad
from kvtax_fleet.records.exposition import cache_config
from kvtax_fleet.records.instances import Instance

POLL_S = 0.2
# Errors by which a fleet fails.
FLEET_ERRORS = (
    RecordsError,
    NoAnswer,
    InstancesError,
    PortsError,
    ServerError,
    SpecError,
    *preflight.CONFIG_ERRORS,
)


class Fleet:
    """The instances that a run sends its requests to, with files in its `folder`.

    Leaving the context ends them; then `machine` has the load, and the records are
    complete. Methods raise FLEET_ERRORS.
    """

    def __init__(self, experiment: Experiment, workshop: Workshop, folder: Path):
        self._experiment = experiment
        self._workshop = workshop
        self._folder = folder
        self._stack = ExitStack()
        self._busy: float | None = None
        self._servers: list[LaunchedInstance] = []
        self._began_s = 0.0
        self.instances: list[Instance] = []
        self.vocab_size = 0
        self.patches: dict[str, str] = {}
        # Processes from before the start.
        self.survivors: list[int] | None = None
        self.gpu_used_mib: list[int] | None = None
        self.pss_mib: dict[str, float] = {}
        self.machine: MachineLoad | None = None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None and self._busy is not None:
            lags = engine_lags(self.folders)
            self.machine = machine_load(self._busy, os.cpu_count() or 1, lags)

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of logs and records, by instance, of those that are launched here."""
        return {each.instance.name: each.folder for each in self._servers}

    def start(self, arm: Arm) -> None:
        """Begin to start all instances."""
        self._began_s = time.monotonic()
        # Orphaned descendants become children of this process (kvtax.proc.supervise).
        self.survivors = sorted(set(descendants(os.getpid())) - zygote_pids())
        self._launch(arm)

    def wait_ready(self) -> float:
        """Wait until all instances answer; return the seconds since the start."""
        deadline_s = self._began_s + READY_DEADLINE_S * self._experiment.instances
        while not all(each.server.is_ready() for each in self._servers):
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"the instances do not answer {deadline_s - self._began_s:.0f} s "
                    "after their start"
                )
            time.sleep(POLL_S)
        self._read_kv_tokens()
        return time.monotonic() - self._began_s

    def metrics(self) -> dict[str, str]:
        """Read the text of /metrics of each instance."""
        return {each.name: http_text(f"{each.url}/metrics") for each in self.instances}

    def check_alive(self) -> None:
        """Raise ServerError if an instance has ended."""
        check_alive(self._servers)

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Measure meanwhile how busy the machine is; then read the peak memory."""
        before = CoreTimes.now()
        with gpu_sampler(self._folder / "gpu.csv"):
            yield
            self._busy = CoreTimes.now().busy_since(before)
            self.pss_mib = {
                each.instance.name: each.server.pss_mib() for each in self._servers
            }

    def _launch(self, arm: Arm) -> None:
        spec = self._experiment.fleet_spec(arm)
        preflight.check_connector(spec.connector)
        if spec.settings.flavour == "gpu":
            gpus = len(spec.roles) * spec.settings.workers
            self.gpu_used_mib = gpu_used_mib(gpus)
        self.vocab_size = self._workshop.checkpoint(spec.settings).vocab_size
        self.patches = self._workshop.overlay(spec)[1]
        folder = self._folder / "instances"
        fleet = launched(spec, self._workshop, folder)
        self._servers = self._stack.enter_context(fleet)
        self.instances = [each.instance for each in self._servers]

    def _read_kv_tokens(self) -> None:
        settings = self._experiment.instance_settings
        tokens = settings.block_size * settings.data_parallel
        self.instances = [
            msgspec.structs.replace(each, kv_tokens=_kv_tokens(each.url, tokens))
            for each in self.instances
        ]


def _kv_tokens(url: str, tokens_per_block: int) -> int | None:
    """Compute how many tokens an instance can cache, None if vLLM does not report it.

    Raises NoAnswer if the instance does not answer.
    """
    blocks = cache_config(http_text(f"{url}/metrics")).get("num_gpu_blocks")
    return None if blocks is None else blocks * tokens_per_block
