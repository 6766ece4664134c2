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
from functools import partial
from pathlib import Path

from fleet.experiment.all_runs import run_experiment
from fleet.experiment.config import read_experiment
from fleet.experiment.prepare import PLAN_FILE, ExperimentError
from fleet.launch.spec import SpecError
from fleet.trace import TraceError
from lab import run_folder
from lab.config import ConfigError
from lab.hosts import apart
from lab.hosts.errors import HostsError
from lab.run_folder import RunFolderError
from lab.serving import preflight
from lab.serving.machine_lock import MachineBusy
from lab.serving.server import ServerError
from lab.serving.supervise import exit_on_signals
from lab.store.errors import StoreError

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
        run = partial(
            run_experiment,
            experiment,
            out,
            arguments.resume,
            arguments.virtual,
            arguments.ray,
            arguments.hosts,
            arguments.store,
        )
        if arguments.ray is not None and not arguments.virtual:
            apart.call(run)
        else:
            run()
    except START_ERRORS as error:
        print(f"fleet.experiment: {error}", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "fleet.analyze", str(out)]).returncode


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
        help="where runs are put, besides --out; a shared folder, s3://...",
    )
    chosen = parser.parse_args()
    if chosen.hosts is not None and (chosen.ray is None or chosen.virtual):
        parser.error("--hosts is for fleets in real time, with --ray")
    if chosen.store is not None and chosen.virtual and chosen.ray is None:
        parser.error("--store with --virtual is for --ray: here runs are in --out")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
