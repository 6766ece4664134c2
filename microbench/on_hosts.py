# SPDX-License-Identifier: Apache-2.0
"""The rounds of a sweep on the hosts of a Ray cluster, each whole on one of them.

Configs are compared within a round, so a host that is slower is so for all of them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from lab.hosts.apart import spread
from lab.hosts.progress import Progress
from lab.hosts.unpack import unpack
from lab.records.documents import read_document, write_document
from lab.records.run import PLAN_FILE, HostRecord, RunRecord
from lab.records.trial import TrialRecord
from microbench.host import JOB, PROVENANCE, Job, Round
from microbench.profile import Profile
from microbench.trial import PlannedTrial, read_finished

MODULE = "microbench.host"


def run_on_hosts(
    address: str,
    python: str | None,
    vllm: str | None,
    run_dir: Path,
    run: RunRecord,
    plan: list[PlannedTrial],
    resume: bool,
) -> list[TrialRecord]:
    """A record for each trial of the plan, which holds whole rounds.

    A round that is done is in `run_dir`, and in run.json who made it. With `resume`
    rounds are left out of which all trials are ok. Raises HostsError.
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
    files = {JOB: msgspec.json.encode(job)}
    tasks = [msgspec.json.encode(Round(repeat)) for repeat in rounds]
    with Progress([f"repeat {repeat}" for repeat in rounds]) as progress:
        done = spread(address, MODULE, files, tasks, alone=True, progress=progress)
        for task, host, packed in done:
            own = [planned for planned in plan if planned.repeat == rounds[task]]
            facts = _take(packed, own, run_dir)
            note(run, host, rounds[task], facts)
            write_document(run_dir / PLAN_FILE, run)
            ok = sum(record.status == "ok" for record in _records(run_dir, own))
            if ok < len(own):
                progress.failed(host)
            print(f"repeat {rounds[task]} on {host}: {ok} of {len(own)} ok", flush=True)
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


def _take(packed: bytes, plan: list[PlannedTrial], run_dir: Path) -> dict:
    """Put the folders of `plan` into `run_dir`; the provenance of who made them."""
    with tempfile.TemporaryDirectory(dir=run_dir) as aside:
        made = unpack(packed, Path(aside))
        for planned in plan:
            _replace(run_dir / planned.folder, made / planned.folder)
        return msgspec.json.decode((made / PROVENANCE).read_bytes())


def _replace(folder: Path, made: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
