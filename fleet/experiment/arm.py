# SPDX-License-Identifier: Apache-2.0
"""One run: a fresh fleet, its router, the replay, and what is needed to trust it."""

from __future__ import annotations

import datetime
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleet.experiment.config import Arm, Experiment
from fleet.experiment.fleets import (
    FLEET_ERRORS,
    Fleet,
    fresh_fleet,
    instance_settings,
)
from fleet.experiment.freshness import (
    counted,
    first_step_cached_blocks,
    gpu_used_mib,
    judge,
)
from fleet.experiment.machine import (
    CpuSampler,
    engine_lags,
    gpu_sampler,
    machine_load,
)
from fleet.experiment.plan import Run
from fleet.experiment.replayers import (
    Status,
    Work,
    merge_shares,
    replaying_here,
    shared_out,
)
from fleet.experiment.router import RunError, started_router
from fleet.instances import write_instances
from fleet.launch.check import http_text
from fleet.launch.launched import Workshop
from lab.hosts.errors import HostLost, HostsError
from lab.records.arm import ArmRecord, FleetHost, Freshness, MachineLoad, PlannedArm
from lab.records.documents import write_document
from lab.records.instances import Instance
from lab.serving.supervise import descendants

# What the folder of an experiment replays.
TRACE = "trace.jsonl.gz"


RUN_ERRORS = (RunError, HostLost, HostsError, *FLEET_ERRORS)


@dataclass(frozen=True)
class ExperimentContext:
    """What all runs of an experiment have in common.

    `elsewhere` makes fleets on other hosts, as fresh_fleet does on this one.
    """

    experiment: Experiment
    trace: Path
    workshop: Workshop
    elsewhere: Callable[[Arm, Path], AbstractContextManager[Fleet]] | None = None

    def fleet(self, arm: Arm, folder: Path) -> AbstractContextManager[Fleet]:
        """A fresh fleet for the run with this folder."""
        if self.elsewhere is not None:
            return self.elsewhere(arm, folder)
        instances = folder / "instances"
        return fresh_fleet(self.experiment, arm, self.workshop, instances)


# Makes runs, and says the folder of each when it is made.
MakeRuns = Callable[
    [ExperimentContext, list[tuple[Run, PlannedArm]], Path], Iterator[Path]
]


@dataclass
class _Found:
    """What a run found out, as far as it came."""

    freshness: Freshness
    instances: list[Instance] = field(default_factory=list)
    patches: dict[str, str] = field(default_factory=dict)
    machine: MachineLoad | None = None
    hosts: list[FleetHost] = field(default_factory=list)
    ready_s: float | None = None
    replay_s: float | None = None
    peak_rss_mib: dict[str, float] = field(default_factory=dict)


def make_run(
    folder: Path, planned: PlannedArm, run: Run, context: ExperimentContext
) -> Exception | None:
    """Fill `folder` with one run's files; what went wrong, which is in its arm.json.

    Files of an earlier attempt are removed first.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC)
    found = _Found(evidence_before_start(planned, context.experiment))
    error = None
    began = time.monotonic()
    try:
        with context.fleet(run.arm, folder) as fleet:
            found.instances, found.patches = fleet.instances, fleet.patches
            found.ready_s, found.hosts = fleet.ready_s, fleet.hosts
            _require_cold(folder, found.freshness, fleet)
            cpu = _replay(folder, found, run, context, fleet)
            found.peak_rss_mib = fleet.peak_rss_mib()
        merge_shares(folder, context.experiment.replayers)
        found.machine = _machine(cpu, fleet)
        _require_cold_in_records(found.freshness, fleet)
    except RUN_ERRORS as failure:
        error = failure
    record = ArmRecord(
        **msgspec.structs.asdict(planned),
        **vars(found),
        status="ok" if error is None else "failed",
        error=None if error is None else str(error),
        started_utc=now.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - began,
    )
    write_document(folder / "arm.json", record)
    return error


def evidence_before_start(planned: PlannedArm, experiment: Experiment) -> Freshness:
    """What can be seen before anything is started."""
    evidence = Freshness()
    if experiment.given is None:
        # Orphaned descendants become children of this process (lab.serving.supervise).
        evidence.survivors = descendants(os.getpid())
    if planned.profile is not None and planned.profile["flavour"] == "gpu":
        workers = instance_settings(experiment).workers
        evidence.gpu_used_mib = gpu_used_mib(experiment.instances * workers)
    return evidence


def _require_cold(folder: Path, evidence: Freshness, fleet: Fleet) -> None:
    """Raises RunError if a cache is not cold: the run would mean nothing."""
    if evidence.survivors is not None:
        evidence.survivors += fleet.survivors
    if fleet.gpu_used_mib is not None:
        evidence.gpu_used_mib = fleet.gpu_used_mib
    for name, text in _keep_metrics(folder, fleet, "before").items():
        evidence.instances[name] = counted(text)
    judge(evidence)
    if not evidence.fresh:
        raise RunError(f"the instances are not fresh: {evidence.why}")


def _require_cold_in_records(evidence: Freshness, fleet: Fleet) -> None:
    """Raises RunError if an engine's first step found something cached.

    The engines must have ended, so that their records are complete.
    """
    found = {
        each.name: first_step_cached_blocks(
            fleet.folders[each.name] / "engine_step.jsonl", each.block_tokens
        )
        for each in fleet.instances
        if each.name in fleet.folders
    }
    evidence.first_step_cached_blocks = {
        name: blocks for name, blocks in found.items() if blocks is not None
    }
    judge(evidence)
    if not evidence.fresh:
        raise RunError(f"the instances were not fresh: {evidence.why}")


def _keep_metrics(folder: Path, fleet: Fleet, moment: str) -> dict[str, str]:
    """The text of /metrics of every instance, which `folder` keeps too."""
    texts = {each.name: http_text(f"{each.url}/metrics") for each in fleet.instances}
    (folder / "metrics").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "metrics" / f"{name}.{moment}.prom").write_text(text)
    return texts


def _replay(
    folder: Path, found: _Found, run: Run, context: ExperimentContext, fleet: Fleet
) -> CpuSampler:
    """Raises RunError if the router did not do its part, ReplayerError."""
    write_instances(folder / "instances.json", fleet.instances)
    with ExitStack() as stack:
        if context.elsewhere is None:
            stack.enter_context(gpu_sampler(folder))
        router = stack.enter_context(started_router(folder, run.arm, fleet))
        stack.enter_context(fleet.under_load())
        cpu = stack.enter_context(CpuSampler())
        began = time.monotonic()
        with _replaying(folder, run, context, fleet, router.url) as status:
            while status() is None:
                fleet.check_alive()
                router.check_alive()
                time.sleep(0.2)
        found.replay_s = time.monotonic() - began
        (folder / router.keeps).write_text(http_text(router.told_at))
    _keep_metrics(folder, fleet, "after")
    return cpu


def _replaying(
    folder: Path, run: Run, context: ExperimentContext, fleet: Fleet, url: str
) -> AbstractContextManager[Status]:
    in_flight = run.concurrency * len(fleet.instances)
    whole = Work(url, fleet.vocab_size, in_flight)
    works = shared_out(whole, context.experiment.replayers)
    if fleet.replaying is not None and len(works) > 1:
        return fleet.replaying(works, context.trace)
    return replaying_here(context.experiment, context.trace, works, folder)


def _machine(cpu: CpuSampler, fleet: Fleet) -> MachineLoad:
    # Each host says so of its own.
    lags = {} if fleet.hosts else engine_lags(fleet.folders)
    return machine_load(cpu, os.cpu_count() or 1, lags)
