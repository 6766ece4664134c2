# SPDX-License-Identifier: Apache-2.0
"""The rounds of a sweep on the hosts of a Ray cluster, each whole on one of them.

Configs are compared within a round, so a host that is slower is so for all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from kvtax.engine import provenance
from kvtax.engine.installation import Installation, installation
from kvtax.engine.preflight import check_machine
from kvtax.engine.releases import release
from kvtax.hosts import Cluster, Task, finished_tasks, require_same
from kvtax.records.files import read_document, write_document, write_whole
from kvtax.records.run import PLAN_FILE, HostRecord, RunRecord, TrialRecord
from microbench.profile import Profile
from microbench.specs import first_trials, round_of
from microbench.trial import TrialSpec, read_finished, run_trial

PROVENANCE = "provenance.json"


def installed_here(python: str | None, vllm: str | None) -> Installation:
    """Return the vLLM to measure on this host. Raises ServerError."""
    if vllm is not None:
        return release(vllm)
    return installation(python or sys.executable)


def run_on_hosts(
    cluster: Cluster,
    python: str | None,
    vllm: str | None,
    run_dir: Path,
    run: RunRecord,
    plan: list[TrialSpec],
    resume: bool,
) -> list[TrialRecord]:
    """Run the whole rounds of `plan` on the hosts; return a record per trial.

    A round that is done is in `run_dir`, and in run.json who made it. With `resume`
    rounds are left out of which all trials are ok. Raises HostsError.
    """
    profile = msgspec.convert(msgspec.to_builtins(run.profile), Profile)
    versions = installed_here(python, vllm).versions
    rounds = {
        f"repeat {repeat}": [trial for trial in plan if trial.repeat == repeat]
        for repeat in sorted({trial.repeat for trial in plan})
    }
    tasks = [
        Task(name, measure_round, (profile, python, vllm, versions, trials[0].repeat))
        for name, trials in rounds.items()
        if not (resume and all(read_finished(run_dir / t.folder, t) for t in trials))
    ]
    for done in finished_tasks(cluster, tasks, measures=True):
        trials = rounds[done.name]
        done.put(run_dir, [str(trial.folder) for trial in trials])
        facts = msgspec.json.decode(done.files[PROVENANCE])
        note(run, done.host, trials[0].repeat, facts | provenance.checkout())
        write_document(run_dir / PLAN_FILE, run)
        ok = sum(record.status == "ok" for record in _records(run_dir, trials))
        print(f"{done.name} on {done.host}: {ok} of {len(trials)} ok", flush=True)
    return _records(run_dir, plan)


def _records(run_dir: Path, plan: list[TrialSpec]) -> list[TrialRecord]:
    files = [run_dir / trial.folder / "trial.json" for trial in plan]
    return [read_document(file, TrialRecord) for file in files]


def note(run: RunRecord, host: str, repeat: int, facts: dict[str, Any]) -> None:
    """Record in `run` that `host`, and no other, made `repeat`."""
    hosts = run.hosts or []
    for other in hosts:
        other.repeats = [number for number in other.repeats if number != repeat]
    known = {record.host: record for record in hosts}
    if host not in known:
        known[host] = HostRecord(host=host, repeats=[], provenance=facts)
        run.hosts = [*hosts, known[host]]
    known[host].repeats.append(repeat)


def measure_round(
    folder: Path,
    profile: Profile,
    python: str | None,
    vllm: str | None,
    versions: dict[str, str],
    repeat: int,
) -> None:
    """Measure one repeat of all configs into `folder`, on this host."""
    installed = installed_here(python, vllm)
    require_same(installed, versions)
    facts = provenance.collect({}, "bash run_all.sh --ray", installed)
    check_machine(profile, installed=installed)
    with first_trials(folder.with_name("specs"), profile, installed) as first:
        for spec in round_of(first, repeat):
            run_trial(folder / spec.folder, spec)
    write_whole(folder / PROVENANCE, msgspec.json.encode(facts))
