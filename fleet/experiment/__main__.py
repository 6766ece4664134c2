# SPDX-License-Identifier: Apache-2.0
"""Run an experiment: every arm on a fresh fleet, in turn, then the comparison.

Exit status: 0 all runs went well and could be compared; 1 a run failed, or a comparison
is refused (the report says which and why); 2 the experiment cannot start; 128 + its
number after a signal.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fleet.experiment.arm import Bench, make_run
from fleet.experiment.config import Experiment, read_experiment
from fleet.experiment.fleets import profile_path, spec
from fleet.experiment.plan import Run, plan
from fleet.experiment.record import ArmRecord
from fleet.experiment.workload import TraceFacts, make_workload
from fleet.launch.launched import Workshop
from fleet.launch.profile import read_profile
from fleet.trace import TraceError
from lab.config import ConfigError
from lab.paths import REPOSITORY
from lab.serving import preflight, provenance
from lab.serving.preflight import PreflightError
from lab.serving.supervise import exit_on_signals

TRACE = "trace.jsonl.gz"


class ExperimentError(Exception):
    """The experiment cannot start; the message says what to do."""


def main() -> int:
    arguments = _arguments()
    exit_on_signals()
    try:
        experiment = read_experiment(arguments.config)
        out = _out(arguments, experiment)
        run_experiment(experiment, out, arguments.resume)
    except (ExperimentError, ConfigError, PreflightError, TraceError) as error:
        print(f"fleet.experiment: {error}", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "fleet.analyze", str(out)]).returncode


def run_experiment(experiment: Experiment, out: Path, resume: bool) -> None:
    """Make all runs of the plan that are not there yet, each in a folder below `out`.

    Raises ExperimentError, ConfigError, PreflightError and TraceError before the first.
    """
    lock = None
    if experiment.profile is not None:
        lock = _lock_machine()
        profile = read_profile(profile_path(experiment))
        preflight.check_machine(profile, experiment.instances)
    runs = plan(experiment)
    records = _prepare(experiment, runs, out, resume)
    with Workshop(out / "workshop") as workshop:
        bench = Bench(experiment, out / TRACE, workshop)
        for number, (run, record) in enumerate(zip(runs, records, strict=True), 1):
            folder = out / run.folder
            if not (resume and _finished(folder)):
                make_run(folder, record, run, bench)
            print(f"{number}/{len(runs)}  {_line(folder)}", flush=True)
    if lock is not None:
        lock.close()


def _prepare(
    experiment: Experiment, runs: list[Run], out: Path, resume: bool
) -> list[ArmRecord]:
    """Put trace and plan into `out`; a record for each of `runs`, yet to be filled.

    Raises ExperimentError, ConfigError and TraceError, and leaves `out` as it was.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-trace-") as aside:
        made = Path(aside) / TRACE
        facts = make_workload(
            experiment.workload,
            REPOSITORY / experiment.workload.trace,
            made,
            not experiment.open_loop,
            experiment.seed,
        )
        check_slots(experiment, facts.sessions)
        versions = _versions()
        records = [_record(experiment, run, facts, versions) for run in runs]
        _keep_plan(out, experiment, facts, versions, resume)
        shutil.move(made, out / TRACE)
    return records


def check_slots(experiment: Experiment, sessions: int) -> None:
    """Raises ExperimentError if fewer requests are in flight than `concurrency`."""
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
    return parser.parse_args()


def _out(arguments: argparse.Namespace, experiment: Experiment) -> Path:
    out = arguments.out
    if arguments.resume and not (out and (out / "experiment.json").exists()):
        raise ExperimentError("--resume needs --out and the folder of an experiment")
    if out is None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        out = REPOSITORY / "runs" / f"{now}-{experiment.name}"
    return out.resolve()


def _versions() -> dict:
    command = " ".join(["python -m fleet.experiment", *sys.argv[1:]])
    return provenance.collect({}) | {"command_line": command}


def _record(
    experiment: Experiment, run: Run, facts: TraceFacts, versions: dict
) -> ArmRecord:
    simulated = experiment.profile is not None
    return ArmRecord(
        experiment=experiment.name,
        arm=run.label,
        repeat=run.repeat,
        policy=run.arm.policy,
        parameters=run.arm.parameters,
        connector=run.arm.connector,
        cache_state=run.arm.cache_state,
        concurrency=run.concurrency,
        baseline=run.baseline,
        same_as=run.same_as,
        open_loop=experiment.open_loop,
        time_scale=experiment.time_scale,
        time_factor=experiment.time_factor,
        trace=facts,
        profile=(
            msgspec.to_builtins(spec(experiment, run.arm).profile)
            if simulated
            else None
        ),
        versions=versions,
    )


def _keep_plan(
    out: Path, experiment: Experiment, facts: TraceFacts, versions: dict, resume: bool
) -> None:
    """Write experiment.json; raises ExperimentError if `out` holds another one."""
    file = out / "experiment.json"
    now = {
        "schema": "kvtax.experiment/1",
        "experiment": msgspec.to_builtins(experiment),
        "trace": msgspec.to_builtins(facts),
        "plan": [run.folder for run in plan(experiment)],
        "versions": versions,
    }
    if file.exists():
        if not resume:
            raise ExperimentError(
                f"{out} holds an experiment already: add --resume, or another --out"
            )
        earlier = json.loads(file.read_text())
        for key in ("experiment", "trace", "plan"):
            if earlier[key] != now[key]:
                raise ExperimentError(f"cannot resume {out}: its {key} is another")
        for key in ("package_versions", "host", "git_commit"):
            if earlier["versions"][key] != versions[key]:
                raise ExperimentError(
                    f"cannot resume {out}: {key} has changed since, and an experiment "
                    "must not mix the two"
                )
        return
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(now, indent=1) + "\n")


def _finished(folder: Path) -> bool:
    """Whether an earlier attempt made this run, and it went well."""
    try:
        record = msgspec.json.decode((folder / "arm.json").read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return record["status"] == "ok"


def _line(folder: Path) -> str:
    record = msgspec.json.decode((folder / "arm.json").read_bytes(), type=ArmRecord)
    line = f"{record.arm:24} r{record.repeat}  {record.status}"
    if record.replay_s is not None:
        line += f"  ready {record.ready_s:.0f} s, replay {record.replay_s:.0f} s"
    if (machine := record.machine) is not None:
        line += f", cores {machine.busy_mean:.0%} busy ({machine.busy_own:.0%} ours)"
        if machine.engine_excess is not None:
            line += f", forwards {machine.engine_late:+.0%}, "
            line += f"steps {machine.engine_excess:+.0%} on the simulated forward"
        if machine.saturated:
            line += "\n      NOT VALID: " + machine.saturated
    if record.error:
        line += "\n      " + record.error.replace("\n", "\n      ")
    return line


def _lock_machine() -> socket.socket:
    """Hold the name that sweeps hold too: two would measure each other."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind("\0kvtax-sweep")
    except OSError:
        raise ExperimentError(
            "a sweep or another experiment is running on this machine"
        ) from None
    return lock


if __name__ == "__main__":
    sys.exit(main())
