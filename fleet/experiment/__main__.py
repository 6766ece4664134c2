# SPDX-License-Identifier: Apache-2.0
"""Run an experiment: every arm on a fresh fleet, in turn, then the comparison.

Exit status: 0 all runs went well and could be compared; 1 a run failed, or a comparison
is refused (the report says which and why); 2 the experiment cannot start; 128 + its
number after a signal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.experiment.arm import TRACE, ExperimentContext, make_run
from fleet.experiment.config import Experiment, read_experiment
from fleet.experiment.fleets import INDEXES, instance_settings
from fleet.experiment.outcome import finished, line
from fleet.experiment.plan import Run, plan
from fleet.experiment.prepare import PLAN_FILE, ExperimentError, begun_on, prepare
from fleet.experiment.virtual import check_virtual, simulate
from fleet.launch.launched import Workshop
from fleet.launch.spec import SpecError
from fleet.trace import TraceError
from lab import run_folder
from lab.config import ConfigError
from lab.hosts.errors import HostLost, HostsError
from lab.records.arm import OUR_PROXY, PlannedArm
from lab.run_folder import RunFolderError
from lab.serving import kvindexd, preflight, vllm_router
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.server import ServerError
from lab.serving.supervise import exit_on_signals
from lab.store.errors import StoreError

if TYPE_CHECKING:
    from fleet.experiment.fleet_on_hosts import FleetHosts

# A run that lost a host so often may be what ends them.
MOST_LOST = 3
# Makes runs in virtual time: context, runs, out.
Simulate = Callable[
    [ExperimentContext, list[tuple[Run, PlannedArm]], Path], Iterator[Path]
]


# All of them before the first run, but for those of hosts and stores: --resume goes on
# from there.
START_ERRORS = (
    ExperimentError,
    ConfigError,
    HostsError,
    MachineBusy,
    RunFolderError,
    ServerError,
    SpecError,
    StoreError,
    TraceError,
    *preflight.CONFIG_ERRORS,
)


def main() -> int:
    arguments = _arguments()
    exit_on_signals()
    try:
        experiment = read_experiment(arguments.config)
        stored = arguments.store is not None
        out = run_folder.choose(
            arguments.out, experiment.name, PLAN_FILE, arguments.resume, stored
        )
        run_experiment(
            experiment,
            out,
            arguments.resume,
            arguments.virtual,
            arguments.ray,
            arguments.hosts,
            arguments.store,
        )
    except START_ERRORS as error:
        print(f"fleet.experiment: {error}", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "fleet.analyze", str(out)]).returncode


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

    Raises START_ERRORS.
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


def _on_hosts(address: str, store_url: str | None, out: Path, resume: bool) -> Simulate:
    """Raises StoreError."""
    # Ray takes a second to import, and is needed here alone.
    from fleet.experiment.on_hosts import simulate_on_hosts
    from lab.store.store import store_of_run

    store = store_url and store_of_run(store_url, out.name, resume)
    return partial(simulate_on_hosts, address, store)


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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.experiment", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("config", type=Path, help="a file of configs/experiments/")
    parser.add_argument("--out", type=Path, help="run folder (default: a new one)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished runs of --out"
    )
    parser.add_argument(
        "--virtual", action="store_true", help="simulate time: fleet/virtual"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="have each fleet on several hosts of this Ray cluster (auto: the one that "
        "this host is in), or the runs of --virtual on all of them: docs/hosts.md",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="with --ray, on how many hosts each fleet is (default: as many as can "
        "have the same number of instances each)",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="with --ray: where hosts put their runs; a shared folder, s3://...",
    )
    chosen = parser.parse_args()
    if chosen.hosts is not None and (chosen.ray is None or chosen.virtual):
        parser.error("--hosts is for fleets in real time, with --ray")
    if chosen.store is not None and (chosen.ray is None or not chosen.virtual):
        parser.error("--store is for --virtual with --ray: other runs are in --out")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
