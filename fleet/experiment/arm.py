# SPDX-License-Identifier: Apache-2.0
"""One run: a fresh fleet, the proxy, the replay, and what is needed to trust it."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleet.experiment.config import Experiment
from fleet.experiment.fleets import Fleet, fresh_fleet, instance_settings
from fleet.experiment.freshness import (
    counted,
    first_step_cached_blocks,
    gpu_used_mib,
    judge,
)
from fleet.experiment.machine import CpuSampler, engine_lag, machine_load
from fleet.experiment.plan import Run
from fleet.instances import InstancesError, write_instances
from fleet.launch.check import CheckError, http_text
from fleet.launch.launched import Workshop
from fleet.launch.spec import SpecError
from lab.records import RecordsError
from lab.records.arm import ArmRecord, Freshness, MachineLoad, PlannedArm
from lab.records.documents import read_document, write_document
from lab.records.instances import Instance
from lab.serving import preflight
from lab.serving.kvindexd import kvindexd
from lab.serving.ports import PortsError, reserve
from lab.serving.server import ServerError, http_ok, tail
from lab.serving.supervise import Supervised, descendants

# What the folder of an experiment replays.
TRACE = "trace.jsonl.gz"
PROXY_DEADLINE_S = 30.0
# fleet.replay's: all went well, a request failed, requests were sent late. What that
# means for a comparison is for fleet.analyze.refusals to say.
REPLAYED = (0, 2, 3)


class RunError(Exception):
    """A run came to nothing; the message says why."""


RUN_ERRORS = (
    RunError,
    RecordsError,
    CheckError,
    InstancesError,
    PortsError,
    ServerError,
    SpecError,
    *preflight.CONFIG_ERRORS,
)


@dataclass(frozen=True)
class ExperimentContext:
    """What all runs of an experiment have in common."""

    experiment: Experiment
    trace: Path
    workshop: Workshop


@dataclass
class _Found:
    """What a run found out, as far as it came."""

    freshness: Freshness
    instances: list[Instance] = field(default_factory=list)
    patches: dict[str, str] = field(default_factory=dict)
    machine: MachineLoad | None = None
    ready_s: float | None = None
    replay_s: float | None = None
    peak_rss_mib: dict[str, float] = field(default_factory=dict)


def make_run(
    folder: Path, planned: PlannedArm, run: Run, context: ExperimentContext
) -> None:
    """Fill `folder` with one run's files; what goes wrong is in its arm.json.

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
        with fresh_fleet(
            context.experiment, run.arm, context.workshop, folder / "instances"
        ) as fleet:
            found.instances, found.patches = fleet.instances, fleet.patches
            found.ready_s = fleet.ready_s
            _require_cold(folder, found.freshness, fleet)
            cpu = _replay(folder, found, run, context, fleet)
            found.peak_rss_mib = {
                each.instance.name: each.server.peak_rss_mib()
                for each in fleet.launched
            }
        found.machine = _machine(cpu, fleet)
        _require_cold_in_records(found.freshness, fleet)
    except RUN_ERRORS as failure:
        error = str(failure)
    record = ArmRecord(
        **msgspec.structs.asdict(planned),
        **vars(found),
        status="ok" if error is None else "failed",
        error=error,
        started_utc=now.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - began,
    )
    write_document(folder / "arm.json", record)


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
        each.instance.name: first_step_cached_blocks(
            each.folder / "engine_step.jsonl", each.instance.block_tokens
        )
        for each in fleet.launched
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
    """Raises RunError if the proxy or the replayer did not do its part."""
    write_instances(folder / "instances.json", fleet.instances)
    port = reserve(1)[0].http
    url = f"http://127.0.0.1:{port}"
    env = dict(os.environ)
    replay_log, proxy_log = folder / "replay.log", folder / "proxy.log"
    with ExitStack() as stack:
        if shutil.which("nvidia-smi"):
            sampler = _module(
                "fleet.experiment.gpu_sampler", "--out", folder / "gpu.csv"
            )
            stack.enter_context(Supervised(sampler, env, folder / "gpu_sampler.log"))
        proxy_command = _proxy(folder, run, fleet, port)
        if run.arm.cache_state == "exact":
            address = stack.enter_context(
                kvindexd(folder / "instances.json", folder / "kvindexd.log")
            )
            proxy_command += ["--kvindexd", address]
        proxy = stack.enter_context(Supervised(proxy_command, env, proxy_log))
        _await(url, proxy, proxy_log)
        cpu = stack.enter_context(CpuSampler())
        began = time.monotonic()
        with Supervised(
            _replayer(folder, run, context, fleet, url), env, replay_log
        ) as replay:
            while (status := replay.poll()) is None:
                fleet.check_alive()
                if proxy.poll() is not None:
                    raise RunError(f"the proxy ended under load\n{tail(proxy_log)}")
                time.sleep(0.2)
        found.replay_s = time.monotonic() - began
        (folder / "breakdown.json").write_text(http_text(f"{url}/breakdown"))
    _keep_metrics(folder, fleet, "after")
    if status not in REPLAYED:
        raise RunError(f"the replayer ended with status {status}\n{tail(replay_log)}")
    return cpu


def _machine(cpu: CpuSampler, fleet: Fleet) -> MachineLoad:
    lags = {
        each.instance.name: engine_lag(
            each.folder / "engine_step.jsonl", each.forward_totals
        )
        for each in fleet.launched
    }
    known = {name: lag for name, lag in lags.items() if lag is not None}
    return machine_load(cpu, os.cpu_count() or 1, known)


def _await(url: str, proxy: Supervised, log: Path) -> None:
    deadline = time.monotonic() + PROXY_DEADLINE_S
    while not http_ok(f"{url}/health"):
        if proxy.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"the proxy did not start\n{tail(log)}")
        time.sleep(0.1)


def _proxy(folder: Path, run: Run, fleet: Fleet, port: int) -> list[str]:
    command = _module("fleet.proxy", "--instances", folder / "instances.json")
    command += ["--policy", run.arm.policy, "--port", str(port)]
    command += ["--log", str(folder / "decisions.jsonl")]
    if fleet.cache_tokens is not None:
        command += ["--mirror-tokens", str(fleet.cache_tokens)]
    given = run.arm.parameters.items()
    return [*command, "--parameters", *(f"{name}={value}" for name, value in given)]


def _replayer(
    folder: Path, run: Run, context: ExperimentContext, fleet: Fleet, url: str
) -> list[str]:
    experiment = context.experiment
    command = _module("fleet.replay", "--url", url, "--trace", context.trace)
    command += ["--out", str(folder / "replay.jsonl")]
    command += ["--vocab-size", str(fleet.vocab_size)]
    command += ["--time-scale", str(experiment.time_scale)]
    command += ["--timeout", str(experiment.request_timeout_s)]
    command += ["--lag-budget-ms", str(experiment.lag_budget_ms)]
    in_flight = run.concurrency * len(fleet.instances)
    command += ["--max-inflight-sessions", str(in_flight)]
    return command if experiment.open_loop else [*command, "--closed-loop"]


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def finished(folder: Path) -> bool:
    """Whether an earlier attempt made this run, and it went well."""
    try:
        return read_document(folder / "arm.json", ArmRecord).status == "ok"
    except RecordsError:
        return False
