# SPDX-License-Identifier: Apache-2.0
"""The main job: measure every config of a profile, then report.

Each config gets a private tree with its patches, and each repeat of it a fresh
server. Repeats run the configs forwards and backwards in turn, so that a machine
that warms up or slows down does so for all of them alike. What stays undecided after
the first repeats is measured again, as often as the profile allows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec

from lab import run_folder
from lab.config import ConfigError
from lab.hosts.errors import HostsError
from lab.paths import REPOSITORY
from lab.records import RecordsError, stacks
from lab.records.documents import read_document, write_document
from lab.records.run import PLAN_FILE, HostRecord, PlanEntry, RunRecord
from lab.run_folder import RunFolderError
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.errors import ServerError
from lab.serving.installation import Installation, installation
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.own_connector import own_connector
from lab.serving.preflight import PreflightError, check_machine
from lab.serving.releases import release
from lab.serving.supervise import exit_on_signals
from lab.store.errors import StoreError
from microbench import report
from microbench.analysis.expected import outcomes
from microbench.check import check
from microbench.compare.__main__ import main as compare
from microbench.fitted import choices, fitted
from microbench.profile import Profile, load_profile, measured_with
from microbench.progress import Progress
from microbench.rounds import configs_of_next_round
from microbench.trial import PlannedTrial, TrialRecord, read_finished
from microbench.workshop import Workshop, workshop


class SweepError(Exception):
    """The sweep cannot start; the message says what to do."""


# Measures the trials of a plan: run_dir, run, plan, resume.
Rounds = Callable[[Path, RunRecord, list[PlannedTrial], bool], list[TrialRecord]]

ERRORS = (
    SweepError,
    ConfigError,
    HostsError,
    MachineBusy,
    PreflightError,
    RecordsError,
    RunFolderError,
    ServerError,
    StoreError,
)


def parse_arguments() -> argparse.Namespace:
    """What run_all.sh was told; exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="run_all.sh",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,  # run_all.sh reads --profile, too.
    )
    parser.add_argument(
        "--profile",
        default="cpu",
        metavar="NAME",
        help="a file of configs/profiles/ (default: cpu; gpu has not been run yet)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="CONFIG",
        help="measure just this config (repeatable)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help="exactly so many servers per config (default: the profile's)",
    )
    parser.add_argument(
        "--connector",
        metavar="MODULE:CLASS",
        help="measure this connector beside plain vLLM and one that does nothing",
    )
    parser.add_argument(
        "--connector-config", metavar="JSON", help="added to its kv_transfer_config"
    )
    parser.add_argument(
        "--limits", type=Path, metavar="FILE", help="what it may cost, or exit with 1"
    )
    parser.add_argument("--model", help="path of real weights (gpu profile)")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--python",
        metavar="PATH",
        default=sys.executable,
        help="measure the vLLM of this Python, which stays as it is",
    )
    measured.add_argument(
        "--vllm",
        metavar="VERSION",
        help="measure this release, in an environment that is made for it",
    )
    parser.add_argument("--out", type=Path, help="run folder (default: a new one)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the finished trials of --out"
    )
    parser.add_argument(
        "--profile-cpu",
        action="store_true",
        help="then sample a further server of each config: where time goes in the code",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="measure on all hosts of a Ray cluster (docs/hosts.md); auto: this one's",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="with --ray: where hosts put what they measured; a shared folder, s3://...",
    )
    parser.add_argument(
        "--check", action="store_true", help="say what would stop it, and stop there"
    )
    return parser.parse_args()


def main() -> int:
    """The exit status: 1 if something stopped it or is not as it should be, else 0."""
    arguments = parse_arguments()
    exit_on_signals()
    try:
        profile = _profile(arguments)
        installed = _installed(arguments, profile)
        if arguments.check:
            return check(profile, installed)
        profile = fitted(profile)
        for choice in choices(profile):
            print(f"run_all: {choice}")
        stored = arguments.store is not None
        run_dir = run_folder.choose(
            arguments.out, arguments.profile, PLAN_FILE, arguments.resume, stored
        )
        # Without --out the result is the repository's own.
        result_dir = arguments.out or REPOSITORY
        on_hosts = _on_hosts(arguments, run_dir)
        # This machine, too, is asked for by its host's agent.
        with nullcontext() if on_hosts else machine_lock():
            trials = sweep(
                run_dir,
                profile,
                installed,
                arguments.resume,
                arguments.profile_cpu,
                on_hosts,
            )
            found = report.report(run_dir, result_dir)
    except ERRORS as error:
        print(f"run_all: {error}", file=sys.stderr)
        return 1
    print(f"run_all: {result_dir / 'SUMMARY.md'}; open {result_dir / 'report.html'}")
    verdicts = outcomes(found.document, found.roles)
    missed = [one for one in verdicts if one.kind != "right"]
    for one in missed:
        print(f"run_all: {one}")
    failed = bool(missed) or any(trial.status != "ok" for trial in trials)
    if arguments.limits:
        new = str(result_dir)
        failed |= compare([new, new, "--limits", str(arguments.limits)]) != 0
    return int(failed)


def sweep(
    run_dir: Path,
    profile: Profile,
    installed: Installation,
    resume: bool,
    profile_cpu: bool,
    on_hosts: Rounds | None = None,
) -> list[TrialRecord]:
    """Run all trials of `profile` into `run_dir`, here or `on_hosts`.

    Raises RunFolderError if `run_dir` holds another run, PreflightError if this machine
    cannot measure and is to, and HostsError.
    """
    if on_hosts is None:
        check_machine(profile, installed=installed)
    with workshop(run_dir, profile, installed) as shop:
        rounds = range(profile.repeats)
        plan = [trial for repeat in rounds for trial in shop.round(repeat)]
        hosts = None if on_hosts is None else []
        run = _begin_run(run_dir, profile, installed, plan, hosts)
        run_all = on_hosts or partial(_run_all, shop)
        records = run_all(run_dir, run, plan, resume)
        while names := configs_of_next_round(run_dir, profile, records):
            # A host measures all configs or none.
            names = names if on_hosts is None else None
            more = shop.round(1 + max(trial.repeat for trial in run.plan), names)
            run.plan += [PlanEntry(trial.config, trial.repeat) for trial in more]
            write_document(run_dir / PLAN_FILE, run)
            records += run_all(run_dir, run, more, resume)
        if profile_cpu:
            _sample(run_dir, shop)
        return records


def _run_all(
    shop: Workshop,
    run_dir: Path,
    run: RunRecord,
    plan: list[PlannedTrial],
    resume: bool,
) -> list[TrialRecord]:
    """A record for each trial of the plan, in its order."""
    records = []
    with Progress(plan) as progress:
        for index, planned in enumerate(plan):
            folder = run_dir / planned.folder
            progress.begin(index)
            record = read_finished(folder, planned) if resume else None
            if record is None:
                record = shop.run(folder, planned)
            progress.end(index, record)
            records.append(record)
    return records


def _sample(run_dir: Path, shop: Workshop) -> None:
    """One more server of each config, on which nothing is measured."""
    for name, planned in shop.ready.items():
        folder = run_dir / name / stacks.FOLDER
        if any(folder.glob("stacks.*.json")):
            continue
        print(f"run_all: sampling {name}", flush=True)
        record = shop.run(folder, planned, sampled=True)
        if record.error:
            print(f"run_all: {name} could not be sampled: {record.error}")


def _begin_run(
    run_dir: Path,
    profile: Profile,
    installed: Installation,
    plan: list[PlannedTrial],
    hosts: list[HostRecord] | None,
) -> RunRecord:
    """Write run.json, or check that it is the run that is resumed.

    Raises RunFolderError.
    """
    file = run_dir / PLAN_FILE
    hashes = {name: sha for trial in plan for name, sha in trial.patches.items()}
    record = RunRecord(
        profile=msgspec.to_builtins(profile),
        provenance=provenance.collect(hashes, "python -m microbench.sweep", installed),
        configs={trial.config: trial.connector.report for trial in plan},
        plan=[PlanEntry(trial.config, trial.repeat) for trial in plan],
        hosts=hosts,
    )
    if not file.exists():
        write_document(file, record)
        return record
    run_folder.check_resumable(
        run_dir,
        run_folder.read_plan(file),
        msgspec.to_builtins(record),
        plan_keys=("profile",),
        provenance_keys=(*run_folder.SAME_MACHINE_AND_CODE, "patch_hashes"),
    )
    earlier = read_document(file, RunRecord)
    if (earlier.hosts is None) != (hosts is None):
        raise RunFolderError(
            f"cannot resume {run_dir}: it was begun with{'out' * (hosts is not None)} "
            "--ray, and a run must not mix the two"
        )
    return earlier


def _on_hosts(arguments: argparse.Namespace, run_dir: Path) -> Rounds | None:
    """None without --ray. Raises SweepError and StoreError."""
    if arguments.ray is None:
        if arguments.store is not None:
            raise SweepError("--store is for --ray: here results are in --out")
        return None
    if arguments.profile_cpu:
        raise SweepError("--profile-cpu samples here: leave out --ray")
    from lab.store.store import store_of_run
    from microbench.on_hosts import run_on_hosts

    python = None if arguments.python == sys.executable else arguments.python
    store = arguments.store and store_of_run(
        arguments.store, run_dir.name, arguments.resume
    )
    return partial(run_on_hosts, arguments.ray, python, arguments.vllm, store)


def _installed(arguments: argparse.Namespace, profile: Profile) -> Installation:
    """The vLLM to be measured. Raises ServerError and SweepError."""
    if arguments.vllm is None:
        return installation(arguments.python)
    if profile.flavour != "cpu":
        raise SweepError("--vllm installs vLLM for the CPU; name a GPU's with --python")
    return release(arguments.vllm)


def _profile(arguments: argparse.Namespace) -> Profile:
    profile = load_profile(arguments.profile)
    if unknown := set(arguments.only or ()) - set(profile.configs):
        # A config outside the profile may be asked for, if it exists.
        for name in unknown:
            load_connector(name)
    changes = {}
    if arguments.connector:
        name, connector = own_connector(arguments.connector, arguments.connector_config)
        changes["own"] = {name: connector}
        changes["configs"] = measured_with(name, profile.configs)
    elif arguments.connector_config:
        raise SweepError("--connector-config needs --connector")
    if arguments.only:
        changes["configs"] = arguments.only
    if arguments.repeats is not None:
        if arguments.repeats < 1:
            raise SweepError("--repeats must be at least 1")
        changes["repeats"] = changes["most_repeats"] = arguments.repeats
    if arguments.model:
        if profile.null_model:
            raise SweepError(f"profile {arguments.profile} has no use for --model")
        changes["model"] = arguments.model
    return msgspec.structs.replace(profile, **changes)


if __name__ == "__main__":
    sys.exit(main())
