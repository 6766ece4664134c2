# SPDX-License-Identifier: Apache-2.0
"""All runs of an experiment, one after the other, or spread over hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.experiment.arm import TRACE, ExperimentContext, MakeRuns, make_run
from fleet.experiment.config import Experiment
from fleet.experiment.fleets import INDEXES, instance_settings
from fleet.experiment.outcome import finished, line
from fleet.experiment.plan import Run, plan
from fleet.experiment.prepare import ExperimentError, begun_on, prepare
from fleet.experiment.virtual import check_virtual, simulate
from fleet.launch.launched import Workshop
from lab.config import ConfigError
from lab.hosts.errors import HostLost, HostsError
from lab.records.arm import OUR_PROXY, PlannedArm
from lab.serving import kvindexd, preflight, vllm_router
from lab.serving.machine_lock import machine_lock

if TYPE_CHECKING:
    from fleet.experiment.fleet_on_hosts import FleetHosts

# A run that lost a host so often may be what ends them.
MOST_LOST = 3


def run_experiment(
    experiment: Experiment,
    out: Path,
    resume: bool,
    virtual: bool,
    ray_address: str | None = None,
    host_count: int | None = None,
    store_url: str | None = None,
) -> None:
    """Make all runs of the plan that are not there yet, each in a folder below `out`.

    Raises START_ERRORS of fleet.experiment.__main__.
    """
    with ExitStack() as stack:
        hosts = None
        if virtual:
            check_virtual(experiment)
        elif any(arm.transfer is not None for arm in experiment.arms.values()):
            raise ConfigError("an arm's `transfer` is for --virtual")
        elif ray_address is not None:
            hosts = stack.enter_context(_fleet_hosts(ray_address, experiment))
            hosts.count = host_count or begun_on(out) or hosts.most()
            if experiment.instances % hosts.count:
                raise ExperimentError(
                    f"{experiment.instances} instances cannot be on {hosts.count} "
                    "hosts, the same number on each: give another --hosts"
                )
        elif experiment.profile is not None:
            stack.enter_context(machine_lock())
            settings = instance_settings(experiment)
            preflight.check_machine(settings, experiment.instances)
        if not virtual:
            _prepare_programs(experiment)
        runs = plan(experiment)
        count = hosts and hosts.count
        arms = prepare(experiment, runs, out, virtual, count)
        workshop = stack.enter_context(Workshop(out / "workshop"))
        elsewhere = hosts and hosts.fleet
        context = ExperimentContext(experiment, out / TRACE, workshop, elsewhere)
        missing = [
            (run, arm)
            for run, arm in zip(runs, arms, strict=True)
            if not (resume and finished(out / run.folder))
        ]
        make = simulate if virtual else _make_runs
        if virtual and ray_address is not None:
            make = _on_hosts(ray_address, store_url, out, resume)
        elif store_url is not None:
            make = _stored(make, store_url, count, out, resume)
        there = len(runs) - len(missing)
        for number, folder in enumerate(make(context, missing, out), there + 1):
            print(f"{number}/{len(runs)}  {line(folder)}", flush=True)


def _prepare_programs(experiment: Experiment) -> None:
    """Build and install what the arms need besides. Raises ServerError."""
    arms = experiment.arms.values()
    for state in {arm.cache_state for arm in arms} & INDEXES.keys():
        kvindexd.build(INDEXES[state])
    if any(arm.router != OUR_PROXY for arm in arms):
        vllm_router.executable()


def _on_hosts(address: str, store_url: str | None, out: Path, resume: bool) -> MakeRuns:
    """Raises StoreError."""
    # Ray takes a second to import, and is needed here alone.
    from fleet.experiment.on_hosts import simulate_on_hosts
    from lab.store.store import store_of_run

    store = store_url and store_of_run(store_url, out.name, resume)
    return partial(simulate_on_hosts, address, store)


def _stored(
    make: MakeRuns, store_url: str, hosts: int | None, out: Path, resume: bool
) -> MakeRuns:
    """Raises StoreError."""
    # What a store takes is imported only where there is one.
    from fleet.experiment.stored import make_or_fetch
    from lab.store.store import store_of_run

    return partial(
        make_or_fetch, make, store_of_run(store_url, out.name, resume), hosts
    )


def _fleet_hosts(
    address: str, experiment: Experiment
) -> AbstractContextManager[FleetHosts]:
    from fleet.experiment.fleet_on_hosts import fleet_hosts

    if experiment.given is not None:
        raise ConfigError("--ray starts instances, and those of `given` have a host")
    return fleet_hosts(address, experiment)


def _make_runs(
    context: ExperimentContext, runs: list[tuple[Run, PlannedArm]], out: Path
) -> Iterator[Path]:
    """The runs' folders, one after the other. Raises HostsError."""
    for run, arm in runs:
        for _ in range(MOST_LOST):
            failure = make_run(out / run.folder, arm, run, context)
            if not isinstance(failure, HostLost):
                break
            print(f"{run.folder}: a host was lost: {failure}", file=sys.stderr)
        yield out / run.folder
        if isinstance(failure, HostsError):
            raise failure
