# SPDX-License-Identifier: Apache-2.0
"""The runs of an experiment in virtual time: plans for fleet.virtual, and its process.

The instances are told what those of a fleet in real time would be told. Runs with one
connector share a process that has imported the connector's private vLLM; the runs
themselves are forks of it, as many at a time as there are jobs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from fleet.experiment.arm import ExperimentContext
from fleet.experiment.config import Experiment
from fleet.experiment.fleets import spec
from fleet.experiment.plan import Run
from fleet.launch.spec import FleetSpec, members, server_of
from fleet.policies import MOVES_KV
from fleet.proxy.settings import Settings, resolved
from fleet.replay.options import Options
from fleet.virtual.plan import Cell, Member
from lab.config import ConfigError
from lab.paths import CONFIGS
from lab.records import RecordsError
from lab.records.arm import ArmRecord, PlannedArm
from lab.records.documents import read_document, write_document
from lab.records.host_times import HostTimes, StepTimes
from lab.records.instances import Instance
from lab.serving import preflight
from lab.serving.ports import FIRST, staggered
from lab.serving.server import tail
from lab.serving.supervise import Supervised

# What a run in virtual time depends on, and what its records therefore say.
PROVENANCE = (
    "vllm_version",
    "python_version",
    "package_versions",
    "git_commit",
    "git_dirty",
)
# Also the order of vLLM's sets of names.
ALIKE = {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
EVENTS = [
    "--kv-events-config",
    '{"enable_kv_cache_events": true, "publisher": "null"}',
]
WATCH_EVERY_S = 0.1


def check_virtual(experiment: Experiment) -> None:
    """Raises ConfigError if the experiment cannot run in virtual time."""
    if experiment.profile is None:
        raise ConfigError("--virtual is for the instances of a `profile`")
    for name, arm in experiment.arms.items():
        wanted = spec(experiment, arm)
        for field in ("forward", "num_blocks"):
            if getattr(wanted.settings, field) is None:
                raise ConfigError(
                    f"--virtual needs `{field}` in "
                    f"configs/fleet/{experiment.profile}.toml"
                )
        preflight.check_connector(wanted.connector)
        host_times(experiment, arm.connector)
        if arm.policy in MOVES_KV and wanted.connector.transfer != "mooncake":
            raise ConfigError(
                f"arm {name!r}: --virtual moves KV as Mooncake does: give it a "
                "`connector` of that kind"
            )
        if arm.policy == "direct_read":
            raise ConfigError(f"arm {name!r}: --virtual reads from no peer yet")


def host_times(experiment: Experiment, connector: str) -> HostTimes:
    """What the experiment's host takes; no time without one. Raises ConfigError."""
    name = experiment.virtual.host
    if name is None:
        return HostTimes("none", {connector: StepTimes()})
    path = CONFIGS / "hosts" / f"{name}.json"
    try:
        found = read_document(path, HostTimes)
    except RecordsError as error:
        raise ConfigError(f"`host` of [virtual]: {error}") from None
    if connector not in found.steps:
        known = ", ".join(found.steps)
        raise ConfigError(f"{path} has no steps with {connector!r}; it has {known}")
    return found


def simulate(
    context: ExperimentContext, runs: list[tuple[Run, PlannedArm]], out: Path
) -> Iterator[Path]:
    """Make the runs, each in its folder below `out`; the folders as they are done.

    Raises SpecError, ServerError and preflight.CONFIG_ERRORS before the first.
    """
    plans: dict[str, list[Cell]] = {}
    env: dict[str, dict[str, str]] = {}
    for run, planned in runs:
        connector = run.arm.connector
        cell, env[connector] = _cell(context, run, planned, out)
        plans.setdefault(connector, []).append(cell)
    jobs = len(os.sched_getaffinity(0))
    for connector, cells in plans.items():
        plan = context.workshop.folder / f"{connector}.plan.json"
        plan.write_bytes(msgspec.json.encode(cells))
        log = plan.with_suffix(".log")
        command = [sys.executable, "-m", "fleet.virtual", str(plan), str(jobs)]
        with Supervised(command, env[connector] | ALIKE, log) as worker:
            yield from _done(cells, worker, log)


def _cell(
    context: ExperimentContext, run: Run, planned: PlannedArm, out: Path
) -> tuple[Cell, dict[str, str]]:
    """The run's cell, and the environment of the process for it."""
    experiment, workshop = context.experiment, context.workshop
    # Events come to no socket here.
    wanted = replace(spec(experiment, run.arm), kv_events=False)
    events = EVENTS if run.arm.cache_state == "exact" else []
    tree, patches = workshop.tree(wanted)
    model = workshop.checkpoint(wanted.settings)
    host = host_times(experiment, run.arm.connector)
    ports = staggered(FIRST, experiment.instances)
    no_gpus: list[list[int]] = [[]] * experiment.instances
    servers = {
        member.instance: server_of(wanted, member, tree, model.folder, workshop.folder)
        for member in members(wanted, ports, no_gpus, workshop.folder)
    }
    cell = Cell(
        folder=str(out / run.folder),
        trace=str(context.trace),
        planned=planned,
        patches=patches,
        members=[
            Member(one, [*server.arguments, *events]) for one, server in servers.items()
        ],
        forward=wanted.settings.forward,
        host=host.steps[run.arm.connector],
        requests=host.requests,
        overlapping=experiment.virtual.scheduling == "async",
        transfer=wanted.settings.transfer,
        event_delay_ns=round(experiment.virtual.event_delay_ms * 1e6),
        vocab_size=model.vocab_size,
        max_model_len=wanted.settings.max_model_len,
        proxy=_proxy(run, wanted, list(servers)),
        replay=_replay(experiment, run, context.trace),
        seed=experiment.seed,
    )
    return cell, next(iter(servers.values())).env


def _proxy(run: Run, wanted: FleetSpec, instances: list[Instance]) -> Settings:
    settings = Settings(
        policy=run.arm.policy,
        parameters=run.arm.parameters,
        cache=run.arm.cache_state,
        mirror_tokens=wanted.settings.num_blocks * wanted.settings.block_size,
    )
    return resolved(instances, settings)


def _replay(experiment: Experiment, run: Run, trace: Path) -> Options:
    return Options(
        url="virtual",
        trace=trace.name,
        time_scale=experiment.time_scale,
        max_inflight_sessions=run.concurrency * experiment.instances,
        closed_loop=not experiment.open_loop,
        timeout_s=experiment.request_timeout_s,
        lag_budget_ms=experiment.lag_budget_ms,
    )


def _done(cells: list[Cell], worker: Supervised, log: Path) -> Iterator[Path]:
    """The cells' folders as they get their arm.json, which comes last."""
    waiting = {Path(cell.folder): cell for cell in cells}
    while waiting:
        ended = worker.poll() is not None
        for folder in [one for one in waiting if (one / "arm.json").exists()]:
            del waiting[folder]
            yield folder
        if ended:
            break
        time.sleep(WATCH_EVERY_S)
    for folder, cell in waiting.items():
        told = msgspec.structs.asdict(cell.planned)
        why = f"the simulation ended before this run\n{tail(log)}"
        folder.mkdir(parents=True, exist_ok=True)
        write_document(
            folder / "arm.json", ArmRecord(**told, status="failed", error=why)
        )
        yield folder
