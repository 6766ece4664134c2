# SPDX-License-Identifier: Apache-2.0
"""The runs of an experiment in virtual time: cells for fleet.virtual, and its process.

The instances are told what those of a fleet in real time would be told. Runs with one
connector share a process that has imported the connector's private vLLM; the runs
themselves are forks of it, as many at a time as there are jobs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from fleet.experiment.arm import ExperimentContext
from fleet.experiment.config import Experiment
from fleet.experiment.fleets import spec
from fleet.experiment.plan import Run
from fleet.launch.spec import HANDED_OVER, FleetSpec, members, server_of
from fleet.policies import MOVES_KV
from fleet.proxy.settings import Settings, resolved
from fleet.replay.options import Options
from fleet.virtual.failed import failed
from fleet.virtual.plan import Cell, Member
from lab.config import ConfigError
from lab.paths import CONFIGS
from lab.records import RecordsError
from lab.records.arm import OUR_PROXY, PlannedArm
from lab.records.documents import read_document
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
# Also the order of vLLM's sets of names. A step's records would hold this machine's
# times.
ALIKE = {
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "KVTAX_STEP_RECORDS_DIR": "",
}
EVENTS = [
    "--kv-events-config",
    '{"enable_kv_cache_events": true, "publisher": "null"}',
]
UNMADE = "the simulation ended before this run\n{log}"
WATCH_EVERY_S = 0.05
# Their names must fit into a pipe that nobody reads yet: 64 KiB.
MOST_WAITING = 100


def check_virtual(experiment: Experiment) -> None:
    """Raises ConfigError if the experiment cannot run in virtual time."""
    if experiment.profile is None:
        raise ConfigError("--virtual is for the instances of a `profile`")
    for name, arm in experiment.arms.items():
        if arm.router != OUR_PROXY:
            raise ConfigError(
                f"arm {name!r}: --virtual has no {arm.router}, which runs in real time "
                "alone: leave the arm or --virtual out"
            )
        wanted = spec(experiment, arm)
        for field in ("forward", "num_blocks"):
            if getattr(wanted.settings, field) is None:
                raise ConfigError(
                    f"--virtual needs `{field}` in "
                    f"configs/fleet/{experiment.profile}.toml"
                )
        preflight.check_connector(wanted.connector)
        host_times(experiment, arm.connector)
        if arm.cache_state == "llm-d":
            raise ConfigError(
                f"arm {name!r}: llm-d's code follows real KV events, and --virtual has "
                'none: leave the arm out, or give it `cache_state = "exact"`'
            )
        if arm.policy in MOVES_KV and wanted.connector.transfer not in HANDED_OVER:
            raise ConfigError(
                f"arm {name!r}: --virtual moves KV as Mooncake and NIXL do: give it a "
                "`connector` of these kinds"
            )
        if arm.policy == "direct_read" and wanted.connector.transfer != "direct_read":
            raise ConfigError(
                f"arm {name!r}: to read from peers, give it a `connector` that can, "
                "such as direct_read_idle"
            )


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
    # vLLM in memory takes a gigabyte for each connector.
    in_turn = sorted(runs, key=_connector)
    for run, _ in in_turn:
        context.workshop.tree(spec(context.experiment, run.arm))
    with Simulation(context) as simulation:
        for _, same in groupby(in_turn, _connector):
            left = list(same)
            while left or simulation.waiting:
                while left and simulation.waiting < MOST_WAITING:
                    run, planned = left.pop(0)
                    simulation.begin(run, planned, out / run.folder)
                yield from simulation.made()
                time.sleep(WATCH_EVERY_S)


def _connector(run: tuple[Run, PlannedArm]) -> str:
    return run[0].arm.connector


class Simulation:
    """Makes runs of an experiment, as many at a time as there are cores."""

    def __init__(self, context: ExperimentContext) -> None:
        self._context = context
        self._workers: dict[str, _Worker] = {}

    @property
    def waiting(self) -> int:
        """Number of runs that were begun and are not made."""
        return sum(len(worker.waiting) for worker in self._workers.values())

    def begin(self, run: Run, planned: PlannedArm, folder: Path) -> None:
        """Have `folder` filled with the run's files, in place of an earlier attempt's.

        Raises what making the connector's private vLLM does.
        """
        shutil.rmtree(folder, ignore_errors=True)
        cell, env = _cell(self._context, run, planned, folder)
        connector = run.arm.connector
        if connector not in self._workers:
            for other in list(self._workers):
                if not self._workers[other].waiting:
                    self._workers.pop(other).stop()
            path = self._context.workshop.folder / connector
            self._workers[connector] = _Worker(path, env)
        self._workers[connector].begin(cell)

    def made(self) -> list[Path]:
        """The folders that have their arm.json, which comes last, by now."""
        return [one for worker in self._workers.values() for one in worker.made()]

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers.values():
            worker.stop()


class _Worker:
    """A process of fleet.virtual. Its pipe, cells and log are beside `path`."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self.waiting: dict[Path, Cell] = {}
        self._path = path
        self._log = path.with_suffix(".log")
        pipe = path.with_suffix(".pipe")
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        # To open it for writing alone would wait until somebody reads.
        self._pipe = os.open(pipe, os.O_RDWR)
        jobs = len(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "fleet.virtual", str(pipe), str(jobs)]
        self._process = Supervised(command, env | ALIKE, self._log)

    def begin(self, cell: Cell) -> None:
        run = f"{cell.planned.arm}.r{cell.planned.repeat}"
        file = self._path.with_suffix(f".{run}.json")
        file.write_bytes(msgspec.json.encode(cell))
        self.waiting[Path(cell.folder)] = cell
        os.write(self._pipe, os.fsencode(file) + b"\n")

    def made(self) -> list[Path]:
        if self._process.poll() is not None:
            for folder, cell in self.waiting.items():
                if not (folder / "arm.json").exists():
                    failed(cell, UNMADE.format(log=tail(self._log)))
        made = [one for one in self.waiting if (one / "arm.json").exists()]
        for folder in made:
            del self.waiting[folder]
        return made

    def stop(self) -> None:
        self._process.stop()
        os.close(self._pipe)


def _cell(
    context: ExperimentContext, run: Run, planned: PlannedArm, folder: Path
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
        folder=str(folder),
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
        transfer=run.arm.transfer or wanted.settings.transfer,
        event_delay_ns=round(experiment.virtual.event_delay_ms * 1e6),
        event_loss=experiment.virtual.event_loss,
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
