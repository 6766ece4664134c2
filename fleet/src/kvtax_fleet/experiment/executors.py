# SPDX-License-Identifier: Apache-2.0
"""All runs of an experiment: in real or virtual time, on this host or on several."""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from kvtax import run_folder
from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.hosts import driver
from kvtax.hosts.code import code
from kvtax.hosts.errors import HostLost, HostsError, StoreError
from kvtax.hosts.store import Store, store_of_run
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import read_document

from kvtax_fleet.experiment.arm_run import FleetMaker, make_run
from kvtax_fleet.experiment.config import (
    INDEXES,
    Experiment,
    check_arms,
    read_experiment,
)
from kvtax_fleet.experiment.experiment_plan import (
    PLAN_FILE,
    TRACE,
    ExperimentError,
    PlannedRun,
    begun_on,
    prepare,
)
from kvtax_fleet.experiment.fleet import fleet_here
from kvtax_fleet.experiment.virtual import Virtual, check_virtual
from kvtax_fleet.experiment.virtual_on_hosts import VirtualOnHosts
from kvtax_fleet.launch import kvindexd, vllm_router
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.records.arm import OUR_PROXY, ArmRecord

if TYPE_CHECKING:
    from kvtax_fleet.experiment.fleet_on_hosts import FleetHosts

# Attempts at a run whose hosts are lost: the run may be the cause.
MOST_LOST = 3


@dataclass(frozen=True)
class RunOptions:
    """Options of `kvtax fleet run`."""

    out: Path | None = None
    resume: bool = False
    virtual: bool = False
    ray: str | None = None
    hosts: int | None = None
    store: str | None = None

    def check(self) -> None:
        """Raise ExperimentError if two options exclude each other."""
        if self.hosts is not None and (self.ray is None or self.virtual):
            raise ExperimentError("--hosts is for fleets in real time, with --ray")
        if self.store is not None and self.virtual and self.ray is None:
            raise ExperimentError(
                "--store with --virtual needs --ray: without, runs are in --out alone"
            )


class Executor(Protocol):
    """A way to make runs, each in its folder."""

    def run(self, runs: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
        """Make the runs; yield each as soon as its folder has the arm.json."""
        ...


def run_experiment(config: Path, options: RunOptions) -> Path:
    """Make all runs of the experiment that are missing; return the run folder.

    Raises ExperimentError, RunFolderError, ConfigError, TraceError, and what launching,
    hosts and stores raise. `--resume` goes on from there.
    """
    options.check()
    experiment = read_experiment(config)
    stored = options.store is not None
    out = run_folder.choose(
        options.out, experiment.name, PLAN_FILE, options.resume, stored
    )
    work = partial(_make_missing, experiment, out, options)
    if options.ray is not None and not options.virtual:
        driver.call(work)
    else:
        work()
    return out


def _make_missing(experiment: Experiment, out: Path, options: RunOptions) -> None:
    trace = out / TRACE
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(out))
        hosts = None
        check_arms(experiment)
        if options.virtual:
            check_virtual(experiment)
        else:
            _check_real(experiment)
            if options.ray is not None:
                hosts = _hosts(stack, experiment, out, options)
            elif experiment.profile is not None:
                stack.enter_context(machine_lock())
                settings = experiment.instance_settings
                preflight.check_machine(settings, experiment.instances)
            _prepare_programs(experiment)
        count = None if hosts is None else hosts.count
        runs = prepare(experiment, out, options.virtual, count)
        workshop = stack.enter_context(Workshop(out / "workshop"))
        store = None
        if options.store is not None:
            store = store_of_run(options.store, out.name, options.resume)
        executor: Executor
        if not options.virtual:
            here = partial(fleet_here, experiment, workshop, trace)
            executor = RealTime(experiment, trace, hosts.fleet if hosts else here)
            if store is not None:
                executor = Stored(executor, store, experiment, trace, count)
        elif options.ray is None:
            executor = Virtual(experiment, trace, workshop)
        else:
            executor = VirtualOnHosts(
                experiment, trace, workshop.folder, options.ray, store
            )
        missing = [run for run in runs if not (options.resume and run.is_finished)]
        first = len(runs) - len(missing) + 1
        for number, run in enumerate(executor.run(missing), first):
            print(f"{number}/{len(runs)}  {outcome(run.folder)}", flush=True)


def _check_real(experiment: Experiment) -> None:
    """Raise ConfigError if the experiment runs in virtual time only."""
    if any(arm.transfer is not None for arm in experiment.arms.values()):
        raise ConfigError("an arm's `transfer` is for --virtual")


def _hosts(
    stack: ExitStack, experiment: Experiment, out: Path, options: RunOptions
) -> FleetHosts:
    """Connect to the hosts of the cluster, and choose how many a fleet is on."""
    # Ray takes a second to import, and is needed here alone.
    from kvtax_fleet.experiment.fleet_on_hosts import fleet_hosts

    if experiment.given is not None:
        raise ConfigError("--ray starts instances, and those of `given` have a host")
    assert options.ray is not None
    hosts = stack.enter_context(fleet_hosts(options.ray, experiment, out / TRACE))
    hosts.count = options.hosts or begun_on(out) or hosts.most()
    if experiment.instances % hosts.count:
        raise ExperimentError(
            f"{experiment.instances} instances cannot be on {hosts.count} hosts, the "
            "same number on each: give another --hosts"
        )
    return hosts


def _prepare_programs(experiment: Experiment) -> None:
    """Build and install routers and indexes of the arms. Raises ServerError."""
    arms = experiment.arms.values()
    for state in {arm.cache_state for arm in arms} & INDEXES.keys():
        kvindexd.build(INDEXES[state])
    if any(arm.router != OUR_PROXY for arm in arms):
        vllm_router.executable()


class RealTime:
    """Makes runs one after the other, each on a fleet that `fleets` makes.

    A run that lost a host is made again. `run` raises HostsError.
    """

    def __init__(self, experiment: Experiment, trace: Path, fleets: FleetMaker) -> None:
        self._experiment = experiment
        self._trace = trace
        self._fleets = fleets

    def run(self, runs: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
        """Make the runs; yield each as soon as its folder has the arm.json."""
        for run in runs:
            for _ in range(MOST_LOST):
                failure = make_run(run, self._experiment, self._trace, self._fleets)
                if not isinstance(failure, HostLost):
                    break
                print(f"{run.run.name}: a host was lost: {failure}", file=sys.stderr)
            yield run
            if isinstance(failure, HostsError):
                raise failure


class Stored:
    """Copies finished runs of another executor to a store, and fetches those there.

    Fleets are on so many `hosts` of a cluster. `run` raises ExperimentError for a
    store of other runs, and StoreError.
    """

    def __init__(
        self,
        executor: Executor,
        store: Store,
        experiment: Experiment,
        trace: Path,
        hosts: int | None,
    ) -> None:
        self._executor = executor
        self._store = store
        self._here = platform.node()
        # All runs of an experiment share it: others must not be compared with them.
        content = hashlib.sha256(trace.read_bytes()).digest()
        parts = [experiment, content, code(), hosts, self._here]
        self._work = hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()

    def run(self, runs: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
        """Fetch or make the runs; yield each as soon as its folder has the arm.json."""
        store = self._store
        pieces = store.pieces()
        if any(piece.work != self._work for piece in pieces.values()):
            raise ExperimentError(
                f"{store.url} has runs of another experiment, code, packages, host of "
                "the command or number of hosts: give another --out; "
                f"kvtax store fetch {store.url} FOLDER takes what is there"
            )
        missing = []
        for run in runs:
            if run.run.name not in pieces:
                missing.append(run)
                continue
            run.folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(run.folder, ignore_errors=True)
            store.fetch(run.run.name, pieces[run.run.name], run.folder)
            yield run
        for run in self._executor.run(missing):
            if run.is_finished:
                self._put(run)
            yield run

    def _put(self, run: PlannedRun) -> None:
        name = run.run.name
        try:
            self._store.put(name, run.folder, self._work, self._here)
        except StoreError as error:
            print(
                f"{name} is in {run.folder}, and not in the store: {error}",
                file=sys.stderr,
            )


def outcome(folder: Path) -> str:
    """Describe how a run went, for the console."""
    record = read_document(folder / "arm.json", ArmRecord)
    text = f"{record.arm:24} r{record.repeat}  {record.status}"
    if record.replay_s is not None:
        text += f"  ready {record.ready_s:.0f} s, replay {record.replay_s:.0f} s"
    if (machine := record.machine) is not None:
        text += f", cores {machine.busy_mean:.0%} busy ({machine.busy_own:.0%} ours)"
        if machine.engine_excess is not None:
            text += f", forwards {machine.engine_late:+.0%}, "
            text += f"steps {machine.engine_excess:+.0%} on the simulated forward"
        if machine.saturated:
            text += "\n      NOT VALID: " + machine.saturated
    for host in record.hosts:
        if host.machine and host.machine.saturated:
            text += f"\n      NOT VALID: {host.host}: {host.machine.saturated}"
    if record.error:
        text += "\n      " + record.error.replace("\n", "\n      ")
    return text
