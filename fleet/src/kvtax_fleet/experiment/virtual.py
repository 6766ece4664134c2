# SPDX-License-Identifier: Apache-2.0
"""Runs in virtual time: cells for kvtax_fleet.simulate, and its processes.

Instances get the same arguments as in real time. Runs with one connector share a
process that has imported the connector's private vLLM, forked from one that has
imported all else; each run is a fork of that process, as many at a time as there are
cores, here or on the hosts of a Ray cluster.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.engine.preloaded import Preloaded
from kvtax.engine.server import tail
from kvtax.hosts import Cluster, Task, finished_tasks
from kvtax.proc.ports import FIRST, staggered
from kvtax.records import RecordsError
from kvtax.records.files import read_document

from kvtax_fleet.experiment.config import (
    Arm,
    Experiment,
    proxy_settings,
    replay_options,
)
from kvtax_fleet.experiment.experiment_plan import TRACE, PlannedRun
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.launch.spec import members, server_of
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.proxy.settings import Settings, resolved
from kvtax_fleet.records.host_times import HostTimes, StepTimes
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.simulate.cells import Cell, Member, write_failed

# Environment in which runs are alike: the order of vLLM's sets of names, and no step
# records, which would hold this machine's times.
ALIKE = {
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "KVTAX_STEP_RECORDS_DIR": "",
}
EVENTS = [
    "--kv-events-config",
    '{"enable_kv_cache_events": true, "publisher": "null"}',
]
UNMADE = "the simulator process ended before it made this run\n{log}"
WATCH_EVERY_S = 0.05
# Runs that share an import of vLLM on a host, and are lost with it.
RUNS_PER_TASK = 4


def check_virtual(experiment: Experiment) -> None:
    """Raise ConfigError if the experiment cannot run in virtual time."""
    for arm in experiment.arms.values():
        wanted = experiment.fleet_spec(arm)
        for field in ("forward", "num_blocks"):
            if getattr(wanted.settings, field) is None:
                raise ConfigError(
                    f"--virtual needs `{field}` in "
                    f"fleet/configs/profiles/{experiment.profile}.toml"
                )
        preflight.check_connector(wanted.connector)
        host_times(experiment, arm.connector)


def host_times(experiment: Experiment, connector: str) -> HostTimes:
    """Read the times of the experiment's host, zero without one. Raises ConfigError."""
    name = experiment.virtual.host
    if name is None:
        return HostTimes("none", {connector: StepTimes()})
    path = CONFIGS / "hosts" / f"{name}.json"
    try:
        times = read_document(path, HostTimes)
    except RecordsError as error:
        raise ConfigError(f"`host` of [virtual]: {error}") from None
    if connector not in times.steps:
        known = ", ".join(times.steps)
        raise ConfigError(f"{path} has no steps with {connector!r}; it has {known}")
    return times


def make_here(
    experiment: Experiment,
    runs: Sequence[PlannedRun],
    trace: Path,
    workshop: Workshop,
    jobs: int | None = None,
) -> Iterator[PlannedRun]:
    """Make the runs, `jobs` at a time; yield each once its folder has the arm.json.

    Raises SpecError, ServerError and preflight.CONFIG_ERRORS before the first.
    """
    # vLLM in memory takes a gigabyte for each connector.
    in_turn = sorted(runs, key=_connector)
    for run in in_turn:
        workshop.overlay(experiment.fleet_spec(run.run.arm))
    jobs = jobs or len(os.sched_getaffinity(0))
    for connector, same in groupby(in_turn, _connector):
        cells = [(run, *_cell(experiment, trace, workshop, run)) for run in same]
        yield from _made(cells, workshop.folder / connector, jobs)


def _made(
    cells: list[tuple[PlannedRun, Cell, dict[str, str]]], path: Path, jobs: int
) -> Iterator[PlannedRun]:
    """Run cells of one connector in a process, with its files and log beside `path`."""
    command = [sys.executable, "-m", "kvtax_fleet.simulate.run_cells", str(jobs)]
    for run, cell, _ in cells:
        # In place of an earlier attempt's files.
        shutil.rmtree(run.folder, ignore_errors=True)
        file = path.with_suffix(f".{cell.planned.arm}.r{cell.planned.repeat}.json")
        file.write_bytes(msgspec.json.encode(cell))
        command.append(str(file))
    log = path.with_suffix(".log")
    waiting = [(run, cell) for run, cell, _ in cells]
    _, _, env = cells[0]
    with Preloaded(command, env | ALIKE, log) as process:
        while waiting:
            has_ended = process.poll() is not None
            for run, cell in list(waiting):
                there = (run.folder / "arm.json").exists()
                if has_ended and not there:
                    write_failed(cell, UNMADE.format(log=tail(log)))
                if has_ended or there:
                    waiting.remove((run, cell))
                    yield run
            time.sleep(WATCH_EVERY_S)


def make_on_hosts(
    cluster: Cluster, experiment: Experiment, runs: Sequence[PlannedRun], trace: Path
) -> Iterator[PlannedRun]:
    """Make the runs on a Ray cluster, a few with each task.

    Raises HostsError.
    """
    by_name = {run.run.name: run for run in runs}
    tasks = [
        Task(
            f"{few[0].run.name} to {few[-1].run.name}",
            _make_there,
            (experiment, few, trace.read_bytes()),
        )
        for few in _tasks(runs)
    ]
    for done in finished_tasks(cluster, tasks, measures=False):
        made = [name for name in by_name if f"{name}/arm.json" in done.files]
        done.put(trace.parent, made)
        yield from (by_name[name] for name in made)


def _tasks(runs: Sequence[PlannedRun]) -> Iterator[list[PlannedRun]]:
    """Group runs with one connector, as the import of vLLM takes seconds."""
    for _, same in groupby(sorted(runs, key=_connector), _connector):
        left = list(same)
        for first in range(0, len(left), RUNS_PER_TASK):
            yield left[first : first + RUNS_PER_TASK]


def _make_there(
    folder: Path, experiment: Experiment, runs: list[PlannedRun], trace: bytes
) -> None:
    moved = [replace(run, folder=folder / run.run.name) for run in runs]
    with tempfile.TemporaryDirectory() as aside:
        (file := Path(aside) / TRACE).write_bytes(trace)
        with Workshop(Path(aside) / "workshop") as workshop:
            for _ in make_here(experiment, moved, file, workshop, jobs=1):
                pass


def _connector(run: PlannedRun) -> str:
    return run.run.arm.connector


def _cell(
    experiment: Experiment, trace: Path, workshop: Workshop, planned_run: PlannedRun
) -> tuple[Cell, dict[str, str]]:
    run = planned_run.run
    # No socket gets the events.
    wanted = experiment.fleet_spec(run.arm)
    events = EVENTS if run.arm.cache_state == "exact" else []
    forward = wanted.settings.forward
    assert forward is not None
    overlay, patches = workshop.overlay(wanted)
    model = workshop.checkpoint(wanted.settings)
    host = host_times(experiment, run.arm.connector)
    ports = staggered(FIRST, experiment.instances)
    no_gpus: list[list[int]] = [[]] * experiment.instances
    servers = {
        member.instance: server_of(
            wanted, member, overlay, model.folder, workshop.folder
        )
        for member in members(wanted, ports, no_gpus)
    }
    cell = Cell(
        folder=str(planned_run.folder),
        trace=str(trace),
        planned=planned_run.planned,
        patches=patches,
        members=[
            Member(instance, [*server.arguments, *events])
            for instance, server in servers.items()
        ],
        forward=forward,
        host=host.steps[run.arm.connector],
        requests=host.requests,
        overlapping=experiment.virtual.scheduling == "async",
        transfer=experiment.transfer(run.arm),
        vocab_size=model.vocab_size,
        max_model_len=wanted.settings.max_model_len,
        proxy=_proxy(run.arm, list(servers)),
        replay=replay_options(
            experiment, run.concurrency, "virtual", trace.name, model.vocab_size
        ),
        seed=experiment.seed,
    )
    return cell, next(iter(servers.values())).env


def _proxy(arm: Arm, instances: list[Instance]) -> Settings:
    settings = proxy_settings(arm, instances)
    settings = msgspec.structs.replace(settings, cache=arm.cache_state)
    return resolved(instances, settings)
