# SPDX-License-Identifier: Apache-2.0
"""Run directories with known truth, written as the launcher and the driver would."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lab.records.documents import write_document
from lab.records.line_file import LineFile
from lab.records.phases import Phase
from lab.records.requests import (
    DriverEnd,
    PhaseStart,
    RequestRecord,
    RequestsHeader,
)
from lab.records.run import PlanEntry, RunRecord
from lab.records.steps import EngineHeader, WorkerHeader
from lab.records.trial import ReadCounts, TrialRecord

STEP_NS = 300_000
FIRST_NS = 10**14


def page_of(folder: Path) -> dict[str, Any]:
    """What report.html shows, as data: its sections by title, and all of it."""
    text = (folder / "report.html").read_text()
    data = text.partition('id="data">')[2].partition("</script>")[0]
    page = json.loads(data)
    return page | {"by_title": {one["title"]: one for one in page["sections"]}}


@dataclass
class Truth:
    """One config: what its steps cost (us), and how the costs move."""

    name: str
    slope: float = 0.0  # us per 1,000 blocks, in schedule()
    drift: float = 0.0  # the same by time instead of |cache|: no fall at the reset
    build_meta: float | None = None
    get_finished: float | None = None
    repeat_offsets: tuple[float, ...] = (0.0,)
    fails: str | None = None
    reads: ReadCounts | None = None


def ar1(rng: np.random.Generator, n: int, rho: float, sd: float) -> np.ndarray:
    """Gaussian AR(1) noise of standard deviation `sd`."""
    shocks = rng.normal(0, sd * np.sqrt(1 - rho**2), n)
    values = np.empty(n)
    last = rng.normal(0, sd)
    for index, shock in enumerate(shocks):
        last = values[index] = rho * last + shock
    return values


def with_outliers(rng: np.random.Generator, us: np.ndarray, share: float) -> np.ndarray:
    """`share` of the steps 2 to 100 times slower, as when a core is stolen."""
    hit = rng.random(len(us)) < share
    return np.where(hit, us * rng.uniform(2, 100, len(us)), us)


def trial_steps(
    truth: Truth, repeat: int, seed: int, steps: int, blocks: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Engine and worker records: 60 % growth, 25 % plateau, 15 % after the reset."""
    rng = np.random.default_rng(seed)
    growth, plateau = int(steps * 0.6), int(steps * 0.25)
    after = steps - growth - plateau
    cache = np.concatenate(
        [
            np.linspace(0, blocks, growth),
            np.full(plateau, blocks) - rng.integers(0, 50, plateau),
            np.linspace(0, blocks * 0.1, after),
        ]
    ).astype(int)
    # The batch grows with |cache|, as the load of a filling server does.
    batch = np.clip(np.round(3 + 4 * cache / blocks + rng.normal(0, 1.5, steps)), 1, 9)
    time = np.linspace(0, blocks, steps)
    grown = truth.slope * cache / 1_000 + truth.drift * time / 1_000
    noise = np.abs(ar1(rng, steps, 0.9, 4)) + rng.exponential(4, steps)
    offset = truth.repeat_offsets[repeat % len(truth.repeat_offsets)]
    meta = truth.build_meta or 0.0
    schedule = 40 + 3 * batch + grown + noise + offset + meta
    schedule = with_outliers(rng, schedule, 0.02)
    finished = (truth.get_finished or 0.0) + rng.exponential(0.5, steps)
    execute = 150 + 2 * batch + finished + 1.2 + rng.exponential(6, steps)
    update = 30 + rng.exponential(3, steps)
    prefill = np.where(rng.random(steps) < 0.1, 512, 0)
    engine = {
        "step_id": np.arange(steps),
        "t_ns": FIRST_NS + np.arange(steps) * STEP_NS,
        "schedule_us": schedule.round(3),
        "step_us": (schedule + execute + update + 12).round(3),
        "running": batch.astype(int),
        "waiting": np.zeros(steps, int),
        "scheduled": batch.astype(int),
        "prefill_tokens": prefill,
        "decode_tokens": batch.astype(int),
        "cache_size": cache,
        "free_blocks": blocks - cache,
        "preemptions": np.zeros(steps, int),
        "update_us": update.round(3),
    }
    worker = {
        "step_id": np.arange(steps),
        "t_ns": engine["t_ns"] + 60_000,
        "execute_model_us": execute.round(3),
    }
    if truth.build_meta is not None:
        engine["build_meta_us"] = (meta + grown).round(3)
        worker |= {
            "bind_us": np.full(steps, 0.4),
            "start_load_kv_us": np.full(steps, 0.6),
            "wait_for_save_us": np.full(steps, 0.2),
            "get_finished_us": finished.round(3),
        }
    return pl.DataFrame(engine), pl.DataFrame(worker)


def write_records(path: Path, header: msgspec.Struct, records: pl.DataFrame) -> None:
    """A JSON lines file with its header line."""
    with path.open("wb") as file:
        file.write(msgspec.json.encode(header) + b"\n")
        records.write_ndjson(file)


def write_requests(path: Path, steps: int, tpot_ms: float) -> None:
    """The driver's records of a trial of `steps` steps: 10 requests per phase."""
    growth, plateau = int(steps * 0.6), int(steps * 0.25)
    starts_ns = {
        Phase.GROWTH: FIRST_NS,
        Phase.PLATEAU: FIRST_NS + growth * STEP_NS,
        Phase.AFTER_RESET: FIRST_NS + (growth + plateau) * STEP_NS,
    }
    with LineFile(path, RequestsHeader(plan={}, scheduled=30)) as file:
        for phase, start_ns in starts_ns.items():
            reset_ns = start_ns if phase is Phase.AFTER_RESET else None
            file.append(PhaseStart(phase.label, start_ns, reset_ns))
            for index in range(10):
                sent_ns = start_ns + index * 1_000_000
                first_ns = sent_ns + 5_000_000
                file.append(
                    RequestRecord(
                        id=10 * phase + index,
                        phase=phase.label,
                        status="ok",
                        http_status=200,
                        prompt_tokens=4096,
                        output_tokens=101,
                        intended_ns=sent_ns - 100_000,
                        sent_ns=sent_ns,
                        first_token_ns=first_ns,
                        end_ns=first_ns + int(100 * tpot_ms * 1e6),
                    )
                )
        file.append(
            DriverEnd(
                scheduled=30,
                ok=30,
                failed=0,
                cancelled=0,
                lag_ms={"p50": 0.1, "p99": 0.5, "max": 0.9},
                lag_budget_ms=2.0,
                valid=True,
            )
        )


def write_run(
    folder: Path,
    truths: list[Truth],
    repeats: int = 2,
    steps: int = 4_000,
    blocks: int = 16_000,
    **changes: Any,
) -> Path:
    """A whole run directory; `changes` go into run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "profile": {"name": "synthetic", "null_model": True, "forward_us": 0},
        "provenance": {
            "vllm_version": "0.18.1",
            "cpu_model": "made up",
            "command_line": "none: synthetic",
        },
        "plan": [PlanEntry(t.name, r) for r in range(repeats) for t in truths],
    }
    write_document(folder / "run.json", RunRecord(**told | changes))
    for number, truth in enumerate(truths):
        for repeat in range(repeats):
            seed = 1_000 * number + repeat
            write_trial(folder, truth, repeat, seed, steps, blocks)
    return folder


def write_trial(
    folder: Path, truth: Truth, repeat: int, seed: int, steps: int, blocks: int
) -> Path:
    """One trial directory."""
    trial = folder / truth.name / f"r{repeat}"
    trial.mkdir(parents=True)
    record = TrialRecord(
        config=truth.name,
        repeat=repeat,
        status="failed" if truth.fails else "ok",
        error=truth.fails,
        num_blocks=blocks,
        block_size=16,
        reads=truth.reads,
    )
    write_document(trial / "trial.json", record)
    if truth.fails:
        return trial
    engine, worker = trial_steps(truth, repeat, seed, steps, blocks)
    write_records(trial / "engine_step.jsonl", EngineHeader(pid=1), engine)
    write_records(trial / "worker_step.r0.jsonl", WorkerHeader(pid=1), worker)
    tpot_ms = float(engine["step_us"].median()) / 1e3
    write_requests(trial / "requests.jsonl", steps, tpot_ms)
    return trial
