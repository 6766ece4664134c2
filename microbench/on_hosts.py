# SPDX-License-Identifier: Apache-2.0
"""The rounds of a sweep on the hosts of a Ray cluster, each whole on one of them.

Configs are compared within a round, so a host that is slower is so for all of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from lab.hosts.delivered import Work, delivered
from lab.records.documents import read_document, write_document
from lab.records.run import PLAN_FILE, HostRecord, RunRecord
from lab.records.trial import TrialRecord
from lab.store.store import Store
from microbench.host import JOB, PROVENANCE, Job, Round
from microbench.profile import Profile
from microbench.trial import PlannedTrial, read_finished

MODULE = "microbench.host"


def run_on_hosts(
    address: str,
    python: str | None,
    vllm: str | None,
    store: Store | None,
    run_dir: Path,
    run: RunRecord,
    plan: list[PlannedTrial],
    resume: bool,
) -> list[TrialRecord]:
    """A record for each trial of the plan, which holds whole rounds.

    A round that is done is in `run_dir`, and in run.json who made it. With `resume`
    rounds are left out of which all trials are ok. Raises HostsError and StoreError.
    """
    profile = msgspec.convert(run.profile, Profile)
    job = Job(profile, python, vllm, run.provenance["package_versions"])
    rounds = sorted(
        {
            planned.repeat
            for planned in plan
            if not (resume and read_finished(run_dir / planned.folder, planned))
        }
    )
    work = Work(
        MODULE,
        {JOB: msgspec.json.encode(job)},
        {_name(repeat): msgspec.json.encode(Round(repeat)) for repeat in rounds},
        alone=True,
    )
    own = {
        _name(repeat): [planned for planned in plan if planned.repeat == repeat]
        for repeat in rounds
    }

    def good(name: str, made: Path) -> bool:
        return all(read_finished(made / one.folder, one) for one in own[name])

    for done in delivered(address, work, run_dir, store, good):
        planned = own[done.name]
        for one in planned:
            _replace(run_dir / one.folder, done.folder / one.folder)
        facts = msgspec.json.decode((done.folder / PROVENANCE).read_bytes())
        note(run, done.host, planned[0].repeat, facts)
        write_document(run_dir / PLAN_FILE, run)
        ok = sum(record.status == "ok" for record in _records(run_dir, planned))
        print(
            f"repeat {planned[0].repeat} on {done.host}: {ok} of {len(planned)} ok",
            flush=True,
        )
    return _records(run_dir, plan)


def _records(run_dir: Path, plan: list[PlannedTrial]) -> list[TrialRecord]:
    files = [run_dir / planned.folder / "trial.json" for planned in plan]
    return [read_document(file, TrialRecord) for file in files]


def note(run: RunRecord, host: str, repeat: int, facts: dict) -> None:
    """Say in `run` who made `repeat`, and that nobody else did."""
    for other in run.hosts:
        other.repeats = [one for one in other.repeats if one != repeat]
    known = {one.host: one for one in run.hosts}
    if host not in known:
        known[host] = HostRecord(host=host, repeats=[], provenance=facts)
        run.hosts.append(known[host])
    known[host].repeats.append(repeat)


def _name(repeat: int) -> str:
    """Of a round, as a store names it."""
    return f"r{repeat}"


def _replace(folder: Path, made: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
