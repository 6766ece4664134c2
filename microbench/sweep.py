# SPDX-License-Identifier: Apache-2.0
"""Measure every config of a profile.

Each config gets an overlay with its patches, and each repeat of it a fresh server.
Repeats run the configs forwards and backwards in turn, so that a machine that warms up
or slows down does so for all of them alike.

After the first repeats, and after each further round, configs without a verdict are
measured again, as often as the profile allows. Several looks give chance several tries,
so all intervals are widened by the number of looks that the profile allows
(kvtax/verdict/measured.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvtax import run_folder
from kvtax.engine import provenance
from kvtax.engine.installation import Installation
from kvtax.engine.preflight import check_machine
from kvtax.records import stacks
from kvtax.records.files import read_document, write_document
from kvtax.records.profile import ProfileRecord
from kvtax.records.run import PLAN_FILE, HostRecord, PlanEntry, RunRecord
from kvtax.run_folder import RunFolderError
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import load_run
from kvtax.verdict.warnings import largest_relative_bound
from microbench.profile import Profile
from microbench.trial import PlannedTrial, TrialRecord, read_finished
from microbench.workshop import Workshop, workshop

# Measures the trials of a plan: run_dir, run, plan, resume.
Rounds = Callable[[Path, RunRecord, list[PlannedTrial], bool], list[TrialRecord]]


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
    with workshop(run_dir, profile, installed) as shop:
        rounds = range(profile.repeats)
        plan = [trial for repeat in rounds for trial in shop.round(repeat)]
        hosts: list[HostRecord] | None = None if on_hosts is None else []
        run = _begin_run(run_dir, profile, installed, plan, hosts)
        run_all = on_hosts or partial(_run_all, shop)
        records = run_all(run_dir, run, plan, resume)
        while names := configs_of_next_round(run_dir, profile, records):
            repeat = 1 + max(trial.repeat for trial in run.plan)
            # A host measures all configs or none.
            more = shop.round(repeat, names if on_hosts is None else None)
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
    """Run the trials of `plan` in order; return their records."""
    records = []
    for number, planned in enumerate(plan, 1):
        folder = run_dir / planned.folder
        count = f"[{number}/{len(plan)}]"
        print(f"{count} {planned.config}, repeat {planned.repeat}", flush=True)
        record = read_finished(folder, planned) if resume else None
        if record is None:
            record = shop.run(folder, planned)
        print(f"    {_outcome(record)}", flush=True)
        records.append(record)
    return records


def _sample(run_dir: Path, shop: Workshop) -> None:
    """Sample the CPU of one more server of each config; nothing is measured on it."""
    for name, planned in shop.ready.items():
        folder = run_dir / name / stacks.FOLDER
        if any(folder.glob("stacks.*.json")):
            continue
        print(f"sweep: sampling {name}", flush=True)
        record = shop.run(folder, planned, sampled=True)
        if record.error:
            print(f"sweep: {name} could not be sampled: {record.error}")


def _begin_run(
    run_dir: Path,
    profile: Profile,
    installed: Installation,
    plan: list[PlannedTrial],
    hosts: list[HostRecord] | None,
) -> RunRecord:
    """Write run.json, or check that the resumed run has the same settings.

    Raises RunFolderError.
    """
    file = run_dir / PLAN_FILE
    hashes = {name: sha for trial in plan for name, sha in trial.patches.items()}
    record = RunRecord(
        profile=msgspec.convert(
            provenance.masked(msgspec.to_builtins(profile)), ProfileRecord
        ),
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
    walls_s = [one.wall_s for one in records if one.wall_s and one.repeat == last]
    if last + 1 >= profile.most_repeats or not walls_s:
        return []
    # At most: a server's start is not longer with more passes.
    expected_s = np.mean(walls_s) * profile.passes(last + 1) / profile.passes(last)
    affordable = max(int((60 * profile.minutes - spent_s) / expected_s), 0)
    return undecided(run_dir, profile.repeats)[:affordable]


def undecided(run_dir: Path, repeats: int) -> list[str]:
    """Return the inconclusive configs of a run; first come those that need least.

    Configs with fewer than `repeats` valid servers count as inconclusive, unless all of
    their servers failed.
    """
    run, trials = load_run(run_dir)
    document = analyse(run, trials, None).document
    more = {
        name: largest_relative_bound(entry)
        for name, entry in document.configs.items()
        if entry.verdict == "inconclusive" or 0 < entry.n_repeats < repeats
    }
    return sorted(more, key=lambda name: more[name])


def _outcome(trial: TrialRecord) -> str:
    """Say how a trial ended."""
    if trial.error:
        return f"{trial.status}: {trial.error.splitlines()[0]}"
    if trial.wall_s and trial.ready_s:
        took = f"ready in {trial.ready_s:.0f} s, {trial.wall_s:.0f} s in all"
        return f"{trial.status}, {took}"
    return trial.status
