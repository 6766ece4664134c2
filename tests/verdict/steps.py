# SPDX-License-Identifier: Apache-2.0
"""Tables of held steps with few rows and round numbers."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kvtax.records.requests import Phase
from kvtax.steps.trial_steps import NO_THREADS, STEP_TIMES

CONTROL = "Thread-2 (process_output_sockets)"
TIMES = (
    *STEP_TIMES,
    "overhead_us",
    "connector_us",
    "worker_calls_us",
    "thread_cpu_us",
    "scheduler_cpu_us",
    "threads_us",
)
MS = 1_000_000


def hold(
    repeat: int = 0,
    number: int = 0,
    level: int = 0,
    *,
    steps: int = 40,
    at_s: float | None = None,
    cache_blocks: int = 1_000,
    **columns: float | Sequence[float] | None,
) -> pl.DataFrame:
    """Make steps of one hold, decodes of 8 requests that take 100 us in every time.

    They begin at `at_s`, 1 ms apart; by default a pass takes 100 s and a level 10.
    """
    at_s = 100 * number + 10 * level if at_s is None else at_s
    given = dict.fromkeys(TIMES, 100.0) | {
        "repeat": repeat,
        "phase": int(Phase.HOLD),
        "cycle": number,
        "level": level,
        "batch": 8,
        "cache_blocks": cache_blocks,
        "decode_only": True,
        "prefills": False,
        "t_ns": [round(at_s * 1e9) + step * MS for step in range(steps)],
        "step_id": range(steps),
        "yardstick_us": None,
    }
    filled = {
        name: [value] * steps if isinstance(value, int | float | None) else value
        for name, value in (given | columns).items()
    }
    schema = dict.fromkeys((*TIMES, "yardstick_us", *columns), pl.Float64)
    schema = {name: kind for name, kind in schema.items() if name.endswith("_us")}
    return pl.DataFrame(filled, schema_overrides=schema | {"cache_blocks": pl.Int64})


def sample(
    repeat: int = 0,
    number: int = 0,
    level: int = 0,
    *,
    us: float,
    steps: int = 40,
    step_id: int = 0,
    thread: str = CONTROL,
    phase: Phase = Phase.HOLD,
) -> pl.DataFrame:
    """Make one sample of a thread in a hold."""
    row = {
        "repeat": repeat,
        "step_id": step_id,
        "phase": int(phase),
        "cycle": number,
        "level": level,
        "batch": 0,
        "cache_blocks": 1_000,
        "steps": steps,
        "thread": thread,
        "us": us,
        "us_per_step": us / steps,
    }
    return pl.DataFrame([row], schema=NO_THREADS.schema)
