# SPDX-License-Identifier: Apache-2.0
"""The rounds of a sweep on the hosts of a Ray cluster, each whole on one of them.

Configs are compared within a round, so a host that is slower is so for all of them. On
a host, kvtax.hosts.agent starts this module as `python -m microbench.on_hosts FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvtax.engine import provenance
from kvtax.engine.installation import Installation, installation
from kvtax.engine.preflight import check_machine
from kvtax.engine.releases import release
from kvtax.hosts.store import Store
from kvtax.hosts.work import Work, finished_tasks
from kvtax.hosts.worker import DoTask, require_packages, serve, undo_ray_environment
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import read_document, write_document, write_whole
from kvtax.records.run import PLAN_FILE, HostRecord, RunRecord, TrialRecord
from microbench.profile import Profile
from microbench.trial import PlannedTrial, read_finished
from microbench.workshop import workshop

MODULE = "microbench.on_hosts"
JOB = "job.json"
PROVENANCE = "provenance.json"


class Job(msgspec.Struct, frozen=True):
    """The sweep; `python` and `vllm` are its options, `packages` the first host's."""

    profile: Profile
    python: str | None
    vllm: str | None
    packages: dict[str, str]

    def installed(self) -> Installation:
        """Return the vLLM to measure on this host. Raises ServerError."""
        if self.vllm is not None:
            return release(self.vllm)
        return installation(self.python or sys.executable)


class Round(msgspec.Struct, frozen=True):
    """One repeat of all configs of the sweep."""

    repeat: int


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
    """Run the whole rounds of `plan` on the hosts; return a record per trial.

    A round that is done is in `run_dir`, and in run.json who made it. With `resume`
    rounds are left out of which all trials are ok. Raises HostsError and StoreError.
    """
    profile = msgspec.convert(run.profile, Profile)
    job = Job(profile, python, vllm, run.provenance["package_versions"])
    missing = {
        trial.repeat
        for trial in plan
        if not (resume and read_finished(run_dir / trial.folder, trial))
    }
    rounds = {
        f"r{repeat}": [trial for trial in plan if trial.repeat == repeat]
        for repeat in sorted(missing)
    }
    tasks = {
        name: msgspec.json.encode(Round(trials[0].repeat))
        for name, trials in rounds.items()
    }
    work = Work(MODULE, {JOB: msgspec.json.encode(job)}, tasks, alone=True)

    def is_good(name: str, made: Path) -> bool:
        return all(read_finished(made / trial.folder, trial) for trial in rounds[name])

    for done in finished_tasks(address, work, run_dir, store, is_good):
        trials = rounds[done.name]
        for trial in trials:
            _replace(run_dir / trial.folder, done.folder / trial.folder)
        facts = msgspec.json.decode((done.folder / PROVENANCE).read_bytes())
        note(run, done.host, trials[0].repeat, facts)
        write_document(run_dir / PLAN_FILE, run)
        ok = sum(record.status == "ok" for record in _records(run_dir, trials))
        print(
            f"repeat {trials[0].repeat} on {done.host}: {ok} of {len(trials)} ok",
            flush=True,
        )
    return _records(run_dir, plan)


def _records(run_dir: Path, plan: list[PlannedTrial]) -> list[TrialRecord]:
    files = [run_dir / trial.folder / "trial.json" for trial in plan]
    return [read_document(file, TrialRecord) for file in files]


def note(run: RunRecord, host: str, repeat: int, facts: dict) -> None:
    """Record in `run` that `host`, and no other, made `repeat`."""
    for other in run.hosts:
        other.repeats = [number for number in other.repeats if number != repeat]
    known = {record.host: record for record in run.hosts}
    if host not in known:
        known[host] = HostRecord(host=host, repeats=[], provenance=facts)
        run.hosts.append(known[host])
    known[host].repeats.append(repeat)


def _replace(folder: Path, made: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


@contextmanager
def _prepared(folder: Path) -> Iterator[DoTask]:
    """Yield the function that measures a round, in one workshop."""
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    undo_ray_environment()
    installed = job.installed()
    facts = provenance.collect({}, "bash run_all.sh --ray", installed)
    require_packages(facts["package_versions"], job.packages)
    with machine_lock():
        check_machine(job.profile, installed=installed)
        with workshop(folder / "shop", job.profile, installed) as shop:

            def measure_round(content: bytes, made: Path) -> None:
                repeat = msgspec.json.decode(content, type=Round).repeat
                for planned in shop.round(repeat):
                    trial = shop.run(made / planned.folder, planned)
                    print(planned.folder, trial.status, trial.error or "", flush=True)
                write_whole(made / PROVENANCE, msgspec.json.encode(facts))

            yield measure_round


if __name__ == "__main__":
    sys.exit(serve(_prepared))
