# SPDX-License-Identifier: Apache-2.0
"""Measure every config of a profile.

Each config gets an overlay with its patches, and each repeat of it a fresh server.
Repeats run the configs forwards and backwards in turn, so that a machine that warms up
or slows down does so for all of them alike.

After the first repeats, and after each further round, configs without a verdict are
measured again, and those of which a statement needs more servers, as often as the
profile allows. Several looks give chance several tries, so all intervals are widened by
the number of looks that the profile allows (kvtax/verdict/measured.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvtax import run_folder
from kvtax.engine import ServerError, provenance
from kvtax.engine.installation import Installation
from kvtax.engine.preflight import check_machine
from kvtax.engine.published import published
from kvtax.records.files import read_document, write_document
from kvtax.records.profile import ProfileRecord
from kvtax.records.run import (
    PLAN_FILE,
    HostRecord,
    Pairs,
    PlanEntry,
    Role,
    RunRecord,
    TrialRecord,
)
from kvtax.run_folder import RunFolderError
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import load_run
from kvtax.verdict.warnings import largest_relative_bound
from microbench import cpu_profile
from microbench.pairs import measure_pairs
from microbench.profile import Profile
from microbench.specs import first_trials, round_of
from microbench.trial import TrialSpec, read_finished, run_trial

GROWING_SERVERS, COMPARED_SERVERS = 3, 2
# Of 20 s each.
PAIRED_PROCESSES = 2
# Of a config: the records of the server that was sampled.
SAMPLED = "sampled"
# Measures the trials of a plan: run_dir, run, plan, resume.
Rounds = Callable[[Path, RunRecord, list[TrialSpec], bool], list[TrialRecord]]


def sweep(
    run_dir: Path,
    profile: Profile,
    installed: Installation,
    resume: bool,
    profile_cpu: bool,
    on_hosts: Rounds | None = None,
) -> list[TrialRecord]:
    """Run all trials of `profile` into `run_dir`, on this machine or `on_hosts`.

    Raises RunFolderError if `run_dir` holds another run, PreflightError if this machine
    cannot measure but must, and HostsError.
    """
    if on_hosts is None:
        check_machine(profile, installed=installed)
    with first_trials(run_dir, profile, installed) as first:
        rounds = range(profile.repeats)
        plan = [trial for repeat in rounds for trial in round_of(first, repeat)]
        hosts: list[HostRecord] | None = None if on_hosts is None else []
        run = _begin_run(run_dir, profile, installed, plan, hosts)
        run_all = on_hosts or _run_all
        records = run_all(run_dir, run, plan, resume)
        while names := configs_of_next_round(run_dir, profile, records):
            repeat = 1 + max(trial.repeat for trial in run.plan)
            # A host measures all configs or none.
            more = round_of(first, repeat, names if on_hosts is None else None)
            run.plan += [PlanEntry(trial.config, trial.repeat) for trial in more]
            write_document(run_dir / PLAN_FILE, run)
            records += run_all(run_dir, run, more, resume)
        if on_hosts is None and installed.is_ours and not run.pairs:
            run.pairs = _measure_pairs(profile)
            write_document(run_dir / PLAN_FILE, run)
        if profile_cpu:
            _sample(run_dir, first)
        return records


def _run_all(
    run_dir: Path, run: RunRecord, plan: list[TrialSpec], resume: bool
) -> list[TrialRecord]:
    """Run the trials of `plan` in order; return their records."""
    records = []
    for number, spec in enumerate(plan, 1):
        folder = run_dir / spec.folder
        count = f"[{number}/{len(plan)}]"
        print(f"{count} {spec.config}, repeat {spec.repeat}", flush=True)
        record = read_finished(folder, spec) if resume else None
        if record is None:
            record = run_trial(folder, spec)
        print(f"    {outcome_line(record)}", flush=True)
        records.append(record)
    return records


def _measure_pairs(profile: Profile) -> list[Pairs]:
    """Measure the profile's pairs of configs, as far as both are measured."""
    pairs = []
    for config, baseline in profile.pairs.items():
        if {config, baseline} <= set(profile.configs):
            print(f"sweep: {config} and {baseline} in turns in one process", flush=True)
            try:
                pairs.append(measure_pairs(config, baseline, PAIRED_PROCESSES))
            except ServerError as error:
                print(f"sweep: {error}")
    return pairs


def _sample(run_dir: Path, first: Mapping[str, TrialSpec]) -> None:
    """Sample the CPU of one more server of each config; nothing is measured on it."""
    for name, spec in first.items():
        folder = run_dir / name / SAMPLED
        if (folder / cpu_profile.FILE).exists():
            continue
        print(f"sweep: sampling {name}", flush=True)
        record = run_trial(folder, dataclasses.replace(spec, sampled=True))
        if record.error:
            print(f"sweep: {name} could not be sampled: {record.error}")
        else:
            how = cpu_profile.HOW_TO_OPEN
            print(f"sweep: {folder / cpu_profile.FILE}: {how}")


def _begin_run(
    run_dir: Path,
    profile: Profile,
    installed: Installation,
    plan: list[TrialSpec],
    hosts: list[HostRecord] | None,
) -> RunRecord:
    """Write run.json, or check that the resumed run has the same settings.

    Raises RunFolderError.
    """
    file = run_dir / PLAN_FILE
    hashes = {name: sha for trial in plan for name, sha in trial.patches.items()}
    record = RunRecord(
        profile=msgspec.convert(published(msgspec.to_builtins(profile)), ProfileRecord),
        provenance=provenance.collect(hashes, "kvtax", installed),
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


def configs_of_next_round(
    run_dir: Path, profile: Profile, records: Sequence[TrialRecord]
) -> list[str]:
    """Return the configs that need another server, as many as the time allows.

    `records` are those of all trials so far, in `run_dir`.
    """
    last = max(record.repeat for record in records)
    spent_s = sum(record.wall_s or 0 for record in records)
    walls_s = [trial.wall_s for trial in records if trial.wall_s]
    if last + 1 >= profile.most_repeats or not walls_s:
        return []
    # At most: a further server has neither growth nor an idle window.
    affordable = max(int((60 * profile.minutes - spent_s) / np.mean(walls_s)), 0)
    return wanting(run_dir, profile)[:affordable]


def wanting(run_dir: Path, profile: Profile) -> list[str]:
    """Return the configs of a run that need another server.

    First come those with fewer valid servers than their statement rests on, then those
    without a verdict, what needs least before the others. A config of which every
    server failed needs none.
    """
    run, trials = load_run(run_dir)
    entries = analyse(run, trials, None).document.configs
    bounds = {}
    for name, entry in entries.items():
        role = run.configs.get(name, Role())
        if 0 < entry.n_repeats < _least_servers(profile, role, entry.verdict):
            bounds[name] = 0.0
        elif entry.verdict == "inconclusive":
            bounds[name] = largest_relative_bound(entry)
    return sorted(bounds, key=lambda name: bounds[name])


def _least_servers(profile: Profile, role: Role, verdict: str | None) -> int:
    """Return how many servers the statement on a config rests on.

    A cost that grows differs from server to server, and what is compared is known no
    better than the servers of both.
    """
    if verdict == "grows":
        least = GROWING_SERVERS
    elif role.role or role.aims:
        least = COMPARED_SERVERS
    else:
        least = profile.repeats
    return min(max(least, profile.repeats), profile.most_repeats)


def outcome_line(trial: TrialRecord) -> str:
    """Render how a trial ended."""
    if trial.error:
        return f"{trial.status}: {trial.error.splitlines()[0]}"
    if trial.wall_s and trial.ready_s:
        took = f"ready in {trial.ready_s:.0f} s, {trial.wall_s:.0f} s in all"
        cold = f"; started cold: {trial.cold_start}" if trial.cold_start else ""
        return f"{trial.status}, {took}{cold}"
    return trial.status
