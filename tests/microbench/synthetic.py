# SPDX-License-Identifier: Apache-2.0
"""Run directories with known truth, written as the launcher and the driver would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lab.records.phases import Phase

STEP_NS = 300_000
FIRST_NS = 10**14


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
    facts: dict[str, Any] = field(default_factory=dict)


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


def write_records(path: Path, header: dict[str, Any], records: pl.DataFrame) -> None:
    """A JSON lines file with its header line."""
    with path.open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        records.write_ndjson(file)


def request_lines(steps: int, tpot_ms: float) -> list[dict[str, Any]]:
    """The driver's records of a trial of `steps` steps."""
    growth, plateau = int(steps * 0.6), int(steps * 0.25)
    reset_ns = FIRST_NS + (growth + plateau) * STEP_NS
    phases = {
        Phase.GROWTH: FIRST_NS,
        Phase.PLATEAU: FIRST_NS + growth * STEP_NS,
        Phase.AFTER_RESET: reset_ns,
    }
    lines: list[dict[str, Any]] = []
    for phase, start in phases.items():
        began = {"type": "phase", "name": phase.label, "start_ns": start}
        reset = {"reset_ns": start} if phase is Phase.AFTER_RESET else {}
        lines.append(began | reset)
        for index in range(10):
            sent = start + index * 1_000_000
            first = sent + 5_000_000
            lines.append(
                {
                    "type": "request",
                    "id": len(lines),
                    "phase": phase.label,
                    "status": "ok",
                    "error": None,
                    "http_status": 200,
                    "prompt_tokens": 4096,
                    "output_tokens": 101,
                    "intended_ns": sent - 100_000,
                    "sent_ns": sent,
                    "first_token_ns": first,
                    "end_ns": first + int(100 * tpot_ms * 1e6),
                }
            )
    counts = {"scheduled": 30, "ok": 30, "failed": 0, "cancelled": 0}
    lag = {"p50": 0.1, "p99": 0.5, "max": 0.9}
    end = {"lag_ms": lag, "lag_budget_ms": 2.0, "valid": True}
    return [*lines, {"type": "end"} | counts | end]


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
    plan = [{"config": t.name, "repeat": r} for r in range(repeats) for t in truths]
    run = {
        "schema": "kvtax.run/1",
        "profile": {"name": "synthetic", "null_model": True, "forward_us": 0},
        "provenance": {
            "vllm_version": "0.18.1",
            "cpu_model": "made up",
            "command_line": "none: synthetic",
        },
        "plan": plan,
    }
    (folder / "run.json").write_text(json.dumps(run | changes))
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
    facts = {
        "schema": "kvtax.trial/1",
        "config": truth.name,
        "repeat": repeat,
        "status": "failed" if truth.fails else "ok",
        "error": truth.fails,
        "num_blocks": blocks,
        "block_size": 16,
    }
    (trial / "trial.json").write_text(json.dumps(facts | truth.facts))
    if truth.fails:
        return trial
    engine, worker = trial_steps(truth, repeat, seed, steps, blocks)
    common = {"clock": "CLOCK_MONOTONIC", "vllm_version": "0.18.1", "pid": 1}
    write_records(
        trial / "engine_step.jsonl", {"schema": "kvtax.engine_step/1"} | common, engine
    )
    write_records(
        trial / "worker_step.r0.jsonl",
        {"schema": "kvtax.worker_step/1", "rank": 0} | common,
        worker,
    )
    header = {"schema": "kvtax.requests/1", "plan": {}, "scheduled": 30}
    lines = [header, *request_lines(steps, float(engine["step_us"].median()) / 1e3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (trial / "requests.jsonl").write_text(text)
    return trial
