# SPDX-License-Identifier: Apache-2.0
"""One run of an arm: a fresh fleet, its router, the replay, and the evidence."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from kvtax.engine.server import tail
from kvtax.proc.supervise import Supervised
from kvtax.records.files import write_document
from kvtax.records.steps import only_life

from kvtax_fleet.experiment.config import Arm, Experiment, replay_options
from kvtax_fleet.experiment.experiment_plan import PlannedRun
from kvtax_fleet.experiment.fleet import FLEET_ERRORS, POLL_S, Fleet
from kvtax_fleet.experiment.freshness import (
    counted,
    first_step_cached_blocks,
    judge,
    keep_metrics,
)
from kvtax_fleet.experiment.router import RunError, started_router
from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.launched import Workshop, http_text
from kvtax_fleet.records.arm import ArmRecord, Freshness, MachineLoad
from kvtax_fleet.records.instances import Instance

RUN_ERRORS = (RunError, *FLEET_ERRORS)
# Exit codes of `kvtax fleet replay` after a replay that reached its end: all went well,
# or a request failed or was late, which kvtax_fleet.analyze.refusals judges.
REPLAYED = (0, 3)


@dataclass
class _Outcome:
    """Fields of arm.json that the run fills in, up to where it failed."""

    freshness: Freshness = field(default_factory=Freshness)
    instances: list[Instance] = field(default_factory=list)
    patches: dict[str, str] = field(default_factory=dict)
    machine: MachineLoad | None = None
    ready_s: float | None = None
    replay_s: float | None = None
    pss_mib: dict[str, float] = field(default_factory=dict)


def make_run(
    run: PlannedRun, experiment: Experiment, trace: Path, workshop: Workshop
) -> None:
    """Fill the run's folder; an error of the run is in its arm.json.

    Files of an earlier attempt are removed first.
    """
    folder = run.folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC)
    outcome = _Outcome()
    error = None
    began = time.monotonic()
    try:
        with Fleet(experiment, workshop, folder) as fleet:
            _start(folder, outcome, run.run.arm, fleet)
            _replay(run, outcome, experiment, trace, fleet)
        outcome.machine = fleet.machine
        _require_cold_records(outcome.freshness, fleet)
    except RUN_ERRORS as failure:
        error = failure
    record = ArmRecord(
        **msgspec.structs.asdict(run.planned),
        **vars(outcome),
        status="ok" if error is None else "failed",
        error=None if error is None else str(error),
        started_utc=now.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - began,
    )
    write_document(folder / "arm.json", record)


def _start(folder: Path, outcome: _Outcome, arm: Arm, fleet: Fleet) -> None:
    """Start the fleet. Raises RunError if a cache is not cold."""
    fleet.start(arm)
    evidence = outcome.freshness
    evidence.survivors, evidence.gpu_used_mib = fleet.survivors, fleet.gpu_used_mib
    outcome.patches = fleet.patches
    outcome.ready_s = fleet.wait_ready()
    outcome.instances = fleet.instances
    texts = fleet.metrics()
    keep_metrics(folder, "before", texts)
    evidence.instances = {name: counted(text) for name, text in texts.items()}
    judge(evidence)
    if not evidence.fresh:
        raise RunError(f"the instances are not fresh: {evidence.why}")


def _require_cold_records(evidence: Freshness, fleet: Fleet) -> None:
    """Raise RunError if an engine's first step found cached blocks.

    The engines must have ended, so that their records are complete.
    """
    folders = fleet.folders
    for each in fleet.instances:
        if each.name in folders:
            records = only_life(folders[each.name]) / "engine_step.jsonl"
            blocks = first_step_cached_blocks(records, each.block_tokens)
            if blocks is not None:
                evidence.first_step_cached_blocks[each.name] = blocks
    judge(evidence)
    if not evidence.fresh:
        raise RunError(f"the instances were not fresh: {evidence.why}")


def _replay(
    run: PlannedRun,
    outcome: _Outcome,
    experiment: Experiment,
    trace: Path,
    fleet: Fleet,
) -> None:
    """Replay the trace through the arm's router. Raises RunError and FLEET_ERRORS."""
    folder, arm = run.folder, run.run.arm
    write_instances(folder / "instances.json", fleet.instances)
    with (
        started_router(folder, arm, fleet.instances) as router,
        fleet.under_load(),
    ):
        began = time.monotonic()
        log = folder / "replay.log"
        command = _replayer(run, experiment, trace, router.url, fleet.vocab_size)
        with Supervised(command, dict(os.environ), log) as replayer:
            while (status := replayer.poll()) is None:
                fleet.check_alive()
                router.check_alive()
                time.sleep(POLL_S)
        if status not in REPLAYED:
            raise RunError(f"the replayer ended with status {status}\n{tail(log)}")
        outcome.replay_s = time.monotonic() - began
        (folder / "breakdown.json").write_text(http_text(router.breakdown_url))
    outcome.pss_mib = fleet.pss_mib
    keep_metrics(folder, "after", fleet.metrics())


def _replayer(
    run: PlannedRun, experiment: Experiment, trace: Path, url: str, vocab_size: int
) -> list[str]:
    """Write the options; return the command of a replay that reads them."""
    options = replay_options(
        experiment, run.run.concurrency, url, str(trace), vocab_size
    )
    file = run.folder / "replay.json"
    write_document(file, options)
    command = [sys.executable, "-m", "kvtax", "fleet", "replay"]
    return [
        *command,
        "--settings",
        str(file),
        "--out",
        str(run.folder / "replay.jsonl"),
    ]
