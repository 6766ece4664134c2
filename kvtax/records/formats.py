# SPDX-License-Identifier: Apache-2.0
"""Every file format of the core, in the order of a run."""

from __future__ import annotations

from kvtax.records import (
    engine_requests,
    observatory_cell,
    per_config,
    replay,
    requests,
    run,
    stacks,
    steps,
)
from kvtax.records.fields import Format

FORMATS = (
    Format(
        "run.json", "What was planned, where, with which versions.", (run.RunRecord,)
    ),
    Format("trial.json", "How a trial, one server lifetime, went.", (run.TrialRecord,)),
    Format(
        "engine_step.jsonl",
        "A line per engine step, written in the engine core by the recorder.",
        (steps.EngineHeader, steps.EngineStep),
    ),
    Format(
        "worker_step.r*.jsonl",
        "A line per step and rank, written in each worker; joins on `step_id`. Of "
        "several ranks the slowest counts: the others wait for it.",
        (steps.WorkerHeader, steps.WorkerStep),
    ),
    Format(
        "threads.jsonl",
        "CPU time of the engine process by thread, four times a second while it steps.",
        (steps.ThreadsHeader, steps.ThreadTimes),
    ),
    Format(
        "engine_request.jsonl",
        "A line per request when it ended, written in the engine core.",
        (engine_requests.EngineRequestHeader, engine_requests.EngineRequest),
    ),
    Format(
        "device_step.jsonl",
        "When each forward of a null device ran beside the host.",
        (steps.DeviceHeader, steps.DeviceStep),
    ),
    Format(
        "stacks.*.json",
        "Sampled stacks of a process, with --profile-cpu.",
        (stacks.SampledStacks,),
    ),
    Format(
        "requests.jsonl",
        "A line per request, phase and end, written by the driver. A trial fails if "
        "they do not add up: scheduled = ok + failed + cancelled.",
        (
            requests.RequestsHeader,
            requests.PhaseStart,
            requests.RequestRecord,
            requests.DriverEnd,
        ),
    ),
    Format(
        "reads.jsonl",
        "A line per turn of the peer that reads from the server.",
        (run.ReadsHeader, run.ReadRecord),
    ),
    Format(
        "replay.jsonl",
        "A line per request of a replayed trace, in the order in which they ended.",
        (replay.ReplayHeader, replay.ReplayedRequest, replay.ReplayEnd),
    ),
    Format(
        "per_config.json",
        "The results of a sweep. A field is null if it was not measured.",
        (per_config.PerConfig,),
    ),
    Format(
        "observatory/*.jsonl.xz",
        "The observatory's cells of a release, a line per connector.",
        (observatory_cell.CellRecord,),
    ),
)
