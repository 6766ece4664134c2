# SPDX-License-Identifier: Apache-2.0
"""Run an experiment: every arm on a fresh fleet, in turn, then the comparison.

Exit status: 0 all runs went well and could be compared; 1 a run failed, or a comparison
is refused (the report says which and why); 2 the experiment cannot start; 128 + its
number after a signal.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleet.experiment.arm import TRACE, ExperimentContext, make_run
from fleet.experiment.config import Experiment, Workload, read_experiment
from fleet.experiment.fleets import INDEXES, instance_settings, spec
from fleet.experiment.outcome import finished, line
from fleet.experiment.plan import Run, plan
from fleet.experiment.virtual import PROVENANCE, check_virtual, simulate
from fleet.experiment.workload import make_workload
from fleet.launch.launched import Workshop
from fleet.launch.spec import SpecError
from fleet.trace import TraceError
from fleet.trace.twin import twin
from lab import run_folder
from lab.config import ConfigError
from lab.hosts.errors import HostLost, HostsError
from lab.paths import REPOSITORY
from lab.records.arm import OUR_PROXY, PlannedArm, TraceFacts
from lab.records.documents import write_document
from lab.records.experiment import ExperimentRecord
from lab.run_folder import RunFolderError
from lab.serving import kvindexd, preflight, provenance, vllm_router
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.server import ServerError
from lab.serving.supervise import exit_on_signals
from lab.store.errors import StoreError

if TYPE_CHECKING:
    from fleet.experiment.fleet_on_hosts import FleetHosts

TWIN = "twin.jsonl.gz"
PLAN_FILE = "experiment.json"
# A run that lost a host so often may be what ends them.
MOST_LOST = 3
# Makes runs in virtual time: context, runs, out.
Simulate = Callable[
    [ExperimentContext, list[tuple[Run, PlannedArm]], Path], Iterator[Path]
]


class ExperimentError(Exception):
    """The experiment cannot start; the message says what to do."""


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
            hosts.count = host_count or _begun_on(out) or hosts.most()
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
        arms = _prepare(experiment, runs, out, virtual, count)
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


def _begun_on(out: Path) -> int | None:
    """On how many hosts each fleet is of the run that is resumed."""
    file = out / PLAN_FILE
    return run_folder.read_plan(file).get("hosts") if file.exists() else None


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


def _prepare(
    experiment: Experiment,
    runs: list[Run],
    out: Path,
    virtual: bool,
    hosts: int | None,
) -> list[PlannedArm]:
    """Put trace and plan into `out`; what arm.json will say of each of `runs`.

    Raises START_ERRORS, and leaves `out` as it was.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-trace-") as aside:
        made = Path(aside) / TRACE
        facts = make_workload(
            experiment.workload,
            source(experiment.workload, Path(aside)),
            made,
            not experiment.open_loop,
            experiment.seed,
        )
        check_slots(experiment, facts.sessions)
        versions = provenance.collect({}, "python -m fleet.experiment")
        if virtual:
            versions = {name: versions[name] for name in PROVENANCE}
        arms = [planned_arm(experiment, run, facts, versions, virtual) for run in runs]
        _keep_plan(out, experiment, facts, versions, hosts)
        shutil.move(made, out / TRACE)
    return arms


def source(workload: Workload, aside: Path) -> Path:
    """The trace to cut from; one that is made up is put `aside`. Raises TraceError."""
    if workload.twin is None:
        return REPOSITORY / workload.trace
    twin(workload.twin, aside / TWIN)
    return aside / TWIN


def check_slots(experiment: Experiment, sessions: int) -> None:
    """Raises ExperimentError if `sessions` cannot fill the closed loop's slots."""
    most = max(experiment.concurrency)
    slots = most * experiment.instances
    if not experiment.open_loop and sessions < slots:
        raise ExperimentError(
            f"{sessions} sessions cannot fill {slots} slots (`concurrency` {most} at "
            f"{experiment.instances} instances), as each has one request in flight: "
            "raise `copies` in [workload], or lower `concurrency`"
        )


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


def planned_arm(
    experiment: Experiment,
    run: Run,
    facts: TraceFacts,
    versions: dict,
    virtual: bool = False,
) -> PlannedArm:
    launched = spec(experiment, run.arm) if experiment.profile is not None else None
    ours = run.arm.router == OUR_PROXY
    return PlannedArm(
        experiment=experiment.name,
        arm=run.label,
        repeat=run.repeat,
        router=OUR_PROXY if ours else f"{run.arm.router} {vllm_router.version()}",
        policy=run.arm.policy,
        parameters=run.arm.parameters,
        connector=run.arm.connector,
        report=launched and launched.connector.report,
        cache_state=run.arm.cache_state if ours else None,
        concurrency=run.concurrency,
        baseline=run.baseline,
        same_as=run.same_as,
        open_loop=experiment.open_loop,
        time_scale=experiment.time_scale,
        time_factor=experiment.time_factor,
        virtual=virtual,
        trace=facts,
        profile=launched and msgspec.to_builtins(launched.settings),
        versions=versions,
    )


def _keep_plan(
    out: Path,
    experiment: Experiment,
    facts: TraceFacts,
    versions: dict,
    hosts: int | None,
) -> None:
    """Write the plan into `out`, or check that it is the one that is resumed.

    Raises RunFolderError.
    """
    file = out / PLAN_FILE
    now = ExperimentRecord(
        experiment=msgspec.to_builtins(experiment),
        trace=facts,
        plan=[run.folder for run in plan(experiment)],
        hosts=hosts,
        versions=versions,
    )
    if file.exists():
        if (begun := _begun_on(out)) != hosts:
            on = f"with --ray, on {begun} hosts" if begun else "without --ray"
            raise RunFolderError(f"cannot resume {out}: its fleets are made {on}")
        run_folder.check_resumable(
            out,
            run_folder.read_plan(file),
            msgspec.to_builtins(now),
            plan_keys=("experiment", "trace", "plan"),
            provenance_keys=set(run_folder.SAME_MACHINE_AND_CODE) & set(versions),
            provenance="versions",
        )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_document(file, now)


if __name__ == "__main__":
    sys.exit(main())
