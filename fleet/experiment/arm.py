# SPDX-License-Identifier: Apache-2.0
"""One run: a fresh fleet, the proxy, the replay, and what is needed to trust it."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet.experiment.config import Experiment
from fleet.experiment.fleets import Fleet, fresh_fleet
from fleet.experiment.freshness import (
    Freshness,
    counted,
    first_step_cached_blocks,
    gpu_used_mib,
    judge,
)
from fleet.experiment.machine import CpuSampler, MachineLoad, engine_lag, machine_load
from fleet.experiment.plan import Run
from fleet.experiment.record import ArmRecord, write_record
from fleet.instances import InstancesError, write_instances
from fleet.launch.check import CheckError, http_text
from fleet.launch.launched import Workshop
from fleet.launch.spec import SpecError
from lab.serving import preflight
from lab.serving.ports import PortsError, reserve
from lab.serving.server import ServerError, http_ok, tail
from lab.serving.supervise import Supervised, descendants

PROXY_DEADLINE_S = 30.0
# fleet.replay's: all went well, a request failed, requests were sent late. What that
# means for a comparison is for fleet.analyze.refusals to say.
REPLAYED = (0, 2, 3)


class RunError(Exception):
    """A run came to nothing; the message says why."""


RUN_ERRORS = (
    RunError,
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


def make_run(
    folder: Path, record: ArmRecord, run: Run, context: ExperimentContext
) -> None:
    """Fill `folder` with one run's files; what goes wrong is in its arm.json.

    Files of an earlier attempt are removed first.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC)
    record.started_utc = now.isoformat(timespec="seconds")
    record.freshness = _before(record, context.experiment)
    began = time.monotonic()
    try:
        with fresh_fleet(
            context.experiment, run.arm, context.workshop, folder / "instances"
        ) as fleet:
            record.instances = msgspec.to_builtins(fleet.instances)
            record.ready_s, record.patches = fleet.ready_s, fleet.patches
            _look(folder, record, fleet)
            cpu = _replay(folder, record, run, context, fleet)
            record.peak_rss_mib = {
                each.instance.name: each.server.peak_rss_mib()
                for each in fleet.launched
            }
        _look_back(record, fleet, cpu)
    except RUN_ERRORS as error:
        record.status, record.error = "failed", str(error)
    record.wall_s = time.monotonic() - began
    write_record(folder, record)


def _before(record: ArmRecord, experiment: Experiment) -> Freshness:
    """What can be seen before anything is started."""
    evidence = Freshness()
    if experiment.given is None:
        # Whatever was orphaned below us has become our child (lab.serving.supervise).
        evidence.survivors = descendants(os.getpid())
    if record.profile is not None and record.profile["flavour"] == "gpu":
        evidence.gpu_used_mib = gpu_used_mib(experiment.instances)
    return evidence


def _look(folder: Path, record: ArmRecord, fleet: Fleet) -> None:
    """Raises RunError if a cache is not cold: what follows would mean nothing."""
    evidence = record.freshness
    for name, text in _metrics(folder, fleet, "before").items():
        evidence.instances[name] = counted(text)
    judge(evidence)
    if not evidence.fresh:
        raise RunError(f"the instances are not fresh: {evidence.why}")


def _look_back(record: ArmRecord, fleet: Fleet, cpu: CpuSampler) -> None:
    """What the engines' records say once they have ended.

    Raises RunError if the first step of one found something cached.
    """
    record.machine = _machine(cpu, fleet)
    found = {
        each.instance.name: first_step_cached_blocks(
            each.folder / "engine_step.jsonl", each.instance.block_tokens
        )
        for each in fleet.launched
    }
    evidence = record.freshness
    evidence.first_step_cached_blocks = {
        name: blocks for name, blocks in found.items() if blocks is not None
    }
    judge(evidence)
    if not evidence.fresh:
        raise RunError(f"the instances were not fresh: {evidence.why}")


def _metrics(folder: Path, fleet: Fleet, moment: str) -> dict[str, str]:
    """/metrics of every instance, kept in `folder` too."""
    texts = {each.name: http_text(f"{each.url}/metrics") for each in fleet.instances}
    (folder / "metrics").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "metrics" / f"{name}.{moment}.prom").write_text(text)
    return texts


def _replay(
    folder: Path, record: ArmRecord, run: Run, context: ExperimentContext, fleet: Fleet
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
        proxy = stack.enter_context(
            Supervised(_proxy(folder, run, fleet, port), env, proxy_log)
        )
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
        record.replay_s = time.monotonic() - began
        (folder / "breakdown.json").write_text(http_text(f"{url}/breakdown"))
    _metrics(folder, fleet, "after")
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
    command += ["--cache", run.arm.cache_state]
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
    if not experiment.open_loop:
        in_flight = run.concurrency * len(fleet.instances)
        command += ["--max-inflight-sessions", str(in_flight)]
    return command


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]
