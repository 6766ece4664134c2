# SPDX-License-Identifier: Apache-2.0
"""Tables of held steps, and of their CPU time, with few rows and round numbers."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kvtax.records.requests import Phase
from kvtax.steps.trial_steps import CPU_SCHEMA, PROCESSES, STEP_TIMES

TIMES = (
    *STEP_TIMES,
    "overhead_us",
    "connector_us",
    "worker_calls_us",
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
    """Make steps of the `number`-th hold, decodes of 8 requests, 100 us in every time.

    They begin at `at_s`, 1 ms apart; by default a hold takes 10 s.
    """
    at_s = 10 * number if at_s is None else at_s
    given = dict.fromkeys(TIMES, 100.0) | {
        "repeat": repeat,
        "phase": int(Phase.HOLD),
        "hold": number,
        "level": level,
        "decoders": 8,
        "age_s": 0.0,
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
    schema |= {name: CPU_SCHEMA[name] for name in PLACE_OF_CPU}
    return pl.DataFrame(filled, schema_overrides=schema | {"cache_blocks": pl.Int64})


PLACE_OF_CPU = ("repeat", "hold", "level", "decoders")


def cpu(
    repeat: int = 0,
    number: int = 0,
    level: int = 0,
    *,
    us: float,
    steps: int = 40,
    of: str = PROCESSES,
) -> pl.DataFrame:
    """Make the CPU time of the `number`-th hold that `of` took, `us` per step."""
    row = (repeat, number, level, 8, steps, of, us)
    return pl.DataFrame([row], schema=CPU_SCHEMA, orient="row")
