# SPDX-License-Identifier: Apache-2.0
"""Made-up records of a server's life, of any length, in files as the recorder's."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvtax.records.requests import EngineRequestHeader
from kvtax.records.steps import EngineHeader, WorkerHeader
from tests.harness.made_up import FIRST_NS, step_columns, write_lines

BATCH_STEPS = 1_000_000
STEP_NS = 320_000
# A request is in so many steps, and a new one comes every so many.
STEPS_OF_REQUEST, STEPS_PER_REQUEST = 200, 50
CACHE_BLOCKS = 17_500
# Long ago enough that nobody takes the server for one that still writes.
AGE_S = 3_600
# One step in so many has the CPU clocks.
CPU_EVERY = 16
# What the recorder times of Mooncake: once per step, or once per request.
PER_REQUEST = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
)
METHODS = ["build_connector_meta", *PER_REQUEST]
WORKER_METHODS = [
    *("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_finished")
]


def write_servers(folder: Path, steps: int, servers: int) -> None:
    """Write `steps` steps in all, in `servers` folders of equal records."""
    first = folder / "server00"
    first.mkdir(parents=True)
    _write(first, steps // servers)
    for path in first.iterdir():
        then = time.time() - AGE_S
        os.utime(path, (then, then))
    for number in range(1, servers):
        other = folder / f"server{number:02}"
        other.mkdir()
        for path in first.iterdir():
            os.link(path, other / path.name)


def _write(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    known: dict[str, Any] = {"vllm_version": "0.18.1", "boot_id": "made-up"}
    files = {
        "engine_step": (EngineHeader(methods=METHODS, **known), _engine, 1),
        "worker_step.r0": (
            WorkerHeader(methods=WORKER_METHODS, **known),
            _worker,
            1,
        ),
        "engine_request": (EngineRequestHeader(**known), _request, STEPS_PER_REQUEST),
    }
    for name, (header, columns, every) in files.items():
        batches = (
            pl.DataFrame(
                columns(rng, np.arange(at, min(at + BATCH_STEPS, count), every), count)
            )
            for at in range(0, count, BATCH_STEPS)
        )
        write_lines(folder / f"{name}.jsonl", header, batches)


def _engine(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of engine records, one in ten a prefill; |cache| grows, and is reset."""
    n = len(ids)
    batch = rng.integers(1, 9, n)
    schedule_us = (46 + 2 * batch + rng.exponential(8, n)).round(3)
    blocks = ids % max(count // 4, 1) * 4 * CACHE_BLOCKS // count
    with_cpu = pl.Series(rng.integers(0, CPU_EVERY, n) == 0)
    arrives = pl.Series(ids % STEPS_PER_REQUEST == 0)
    calls = pl.DataFrame({name: rng.exponential(9, n).round(3) for name in PER_REQUEST})
    return step_columns(
        "engine",
        ids,
        t_ns=FIRST_NS + ids * STEP_NS,
        schedule_us=schedule_us,
        build_meta_us=(1.2 + rng.exponential(0.1, n)).round(3),
        step_us=(270 + rng.exponential(8, n)).round(3),
        running=batch,
        scheduled=batch,
        prefill_tokens=np.where(rng.random(n) < 0.1, 512, 0),
        decode_tokens=batch,
        cache_size=blocks,
        free_blocks=18_000 - 200 * batch,
        preemptions=[None] * n,
        update_us=(23 + rng.exponential(4, n)).round(3),
        schedule_cpu_us=_only(with_cpu, schedule_us),
        update_cpu_us=_only(with_cpu, (23 + rng.exponential(4, n)).round(3)),
        thread_cpu_us=_only(with_cpu, (200 + rng.exponential(8, n)).round(3)),
        connector_self_us=_only(arrives, calls.to_struct()),
    )


def _worker(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of worker records."""
    n = len(ids)
    return step_columns(
        "worker",
        ids,
        t_ns=FIRST_NS + ids * STEP_NS + 80_000,
        execute_model_us=(160 + rng.exponential(4, n)).round(3),
        bind_us=(0.3 + rng.exponential(0.1, n)).round(3),
        start_load_kv_us=(0.6 + rng.exponential(0.1, n)).round(3),
        wait_for_save_us=(0.2 + rng.exponential(0.1, n)).round(3),
        get_finished_us=(70 + rng.exponential(8, n)).round(3),
    )


def _only(rows: pl.Series, values: np.ndarray | pl.Series) -> pl.Series:
    """Return `values` in those rows; nothing was recorded in the others."""
    one = pl.Series(values)
    return pl.select(pl.when(rows).then(one)).to_series()


def _request(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of engine_request records, one in twenty preempted."""
    n = len(ids)
    last = np.minimum(ids + STEPS_OF_REQUEST, count - 1)
    token = np.minimum(ids + 1, last)
    preempted = rng.random(n) < 0.05
    return {
        "id": [f"{number:016x}" for number in ids],
        "arrival_ns": FIRST_NS + ids * STEP_NS - rng.integers(0, 10**6, n),
        "prompt_tokens": rng.integers(1, 9_000, n),
        "before_engine_us": rng.exponential(800, n).round(1),
        "first_step": ids,
        "first_token_step": token,
        "last_step": last,
        "finished_ns": FIRST_NS + last * STEP_NS + 250_000,
        "finish_reason": ["length"] * n,
        "cached_tokens": rng.integers(0, 9_000, n),
        "external_tokens": np.zeros(n, int),
        "output_tokens": last - token + 1,
        "preemptions": preempted.astype(int),
        "preempted_steps": [
            [int(one) + 10, int(one) + 20] if there and one + 20 < count else []
            for one, there in zip(ids, preempted, strict=True)
        ],
    }
