# SPDX-License-Identifier: Apache-2.0
"""A run of one trial with as many step records as wanted, made up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from lab.records.documents import write_document
from lab.records.line_file import LineFile
from lab.records.phases import Phase
from lab.records.requests import DriverEnd, PhaseStart, RequestsHeader
from lab.records.run import PlanEntry, RunRecord
from lab.records.steps import EngineHeader, WorkerHeader
from lab.records.trial import TrialRecord

BATCH_RECORDS = 1_000_000


def write_files(trial: Path, count: int) -> None:
    """Engine and worker records of `count` steps, |cache| growing to 17,500."""
    rng = np.random.default_rng(0)
    headers = {
        "engine_step.jsonl": EngineHeader(pid=1),
        "worker_step.r0.jsonl": WorkerHeader(rank=0),
    }
    for name, header in headers.items():
        with (trial / name).open("wb") as file:
            file.write(msgspec.json.encode(header) + b"\n")
            for first in range(0, count, BATCH_RECORDS):
                ids = np.arange(first, min(first + BATCH_RECORDS, count))
                columns = (engine if "engine" in name else worker)(rng, ids, count)
                pl.DataFrame(columns).write_ndjson(file)


def engine(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of engine records as the patches write them, one in ten a prefill."""
    n = len(ids)
    batch = rng.integers(1, 9, n)
    noise = rng.exponential(8, n)
    return {
        "step_id": ids,
        "t_ns": 10**14 + ids * 300_000,
        "schedule_us": (46 + 2 * batch + noise).round(3),
        "build_meta_us": (1.2 + rng.exponential(0.1, n)).round(3),
        "step_us": (252 + noise + rng.exponential(40, n)).round(3),
        "running": batch,
        "waiting": np.zeros(n, int),
        "scheduled": batch,
        "prefill_tokens": np.where(rng.random(n) < 0.1, 512, 0),
        "decode_tokens": batch,
        "cache_size": ids * 17_500 // count,
        "free_blocks": np.full(n, 1_000),
        "preemptions": np.zeros(n, int),
        "update_us": (33 + rng.exponential(4, n)).round(3),
    }


def worker(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of worker records with all connector methods."""
    n = len(ids)
    return {
        "step_id": ids,
        "t_ns": 10**14 + ids * 300_000,
        "execute_model_us": (180 + rng.exponential(8, n)).round(3),
        "bind_us": (0.3 + rng.exponential(0.1, n)).round(3),
        "start_load_kv_us": (0.6 + rng.exponential(0.1, n)).round(3),
        "wait_for_save_us": (0.2 + rng.exponential(0.1, n)).round(3),
        "get_finished_us": (70 + rng.exponential(8, n)).round(3),
    }


def write_run(folder: Path, count: int) -> None:
    """A run directory of one trial, all of it growth."""
    trial = folder / "plain" / "r0"
    trial.mkdir(parents=True)
    write_document(folder / "run.json", RunRecord(plan=[PlanEntry("plain", 0)]))
    write_document(
        trial / "trial.json",
        TrialRecord(
            config="plain", repeat=0, status="ok", num_blocks=17_500, block_size=16
        ),
    )
    with LineFile(trial / "requests.jsonl", RequestsHeader(scheduled=0)) as file:
        file.append(PhaseStart(Phase.GROWTH.label, 0))
        file.append(DriverEnd(scheduled=0, ok=0, failed=0, cancelled=0))
    write_files(trial, count)
