# SPDX-License-Identifier: Apache-2.0
"""The one split of a step into parts.

A step is model + scheduler + connector + other. The connector's calls are made within
`schedule()`, `update_from_output()` and the worker's `execute_model`, so they are taken
out of scheduler and model, neither of which goes below zero: a step may have calls
elsewhere, and those outside of it are taken out before.

Each method of the connector has two columns: `scheduler.NAME_us` or `worker.NAME_us` is
its time less that of the connector's methods which it called, and the same name with
`_calls` is how often it was called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from kvtax.records.steps import METHOD_FIELDS, EngineStep, WorkerStep, calls_by_method

CALLS = "_calls"
SIDES = ("scheduler", "worker")
# Columns of the parts that add up to a step, and their names for readers.
STEP_PARTS = {
    "model_us": "model",
    "scheduler_us": "scheduler",
    "connector_us": "connector",
    "other_us": "other",
}


def method_columns(steps: pl.DataFrame) -> list[str]:
    """Return the columns of single connector methods' times."""
    return [
        name
        for name in steps.columns
        if name.partition(".")[0] in SIDES and name.endswith("_us")
    ]


def step_parts(methods: Sequence[str]) -> dict[str, pl.Expr]:
    """Return STEP_PARTS of a table of steps with these columns of methods, and sums.

    `connector_us` is null where no method was timed: its time is then in the other
    parts. `worker_calls_us` are the connector's calls in the worker; `overhead_us` is
    what scheduler and connector take of a step: schedule(), update_from_output() and
    these calls. Both are null without a worker's record.
    """
    in_scheduler, in_worker = (_calls_us(methods, side) for side in SIDES)
    connector = in_scheduler + in_worker
    schedule, update = pl.col("schedule_us"), pl.col("update_us")
    executed = pl.col("execute_model_us")
    model = _own(executed.fill_null(0), in_worker)
    scheduler = _own(schedule.fill_null(0) + update.fill_null(0), in_scheduler)
    worker_calls = pl.when(executed.is_not_null()).then(in_worker)
    parts = {
        "model_us": model,
        "scheduler_us": scheduler,
        "connector_us": connector if methods else pl.lit(None),
        "other_us": pl.col("step_us") - model - scheduler - connector,
        "worker_calls_us": worker_calls,
        "overhead_us": schedule + update + worker_calls,
    }
    return {name: part.cast(pl.Float32).alias(name) for name, part in parts.items()}


def _calls_us(methods: Sequence[str], side: str) -> pl.Expr:
    own = [pl.col(name).fill_null(0) for name in methods if name.startswith(side)]
    return pl.sum_horizontal(own) if own else pl.lit(0, pl.Float32)


def _own(whole: pl.Expr, calls: pl.Expr) -> pl.Expr:
    return (whole - calls).clip(lower_bound=0)


def side_parts(
    step: EngineStep | WorkerStep,
) -> tuple[float, dict[str, int], dict[str, float]]:
    """Split one side's record: scheduler or model, calls, and their times by method.

    Times are in us, as step_parts computes them.
    """
    if isinstance(step, EngineStep):
        side, whole_us = "scheduler", (step.schedule_us or 0) + (step.update_us or 0)
    else:
        side, whole_us = "worker", step.execute_model_us or 0
    calls, times = calls_by_method(step, METHOD_FIELDS[side])
    own_us = max(whole_us - sum(times.values()), 0)
    return (
        own_us,
        {f"{side}.{name}": count for name, count in calls.items()},
        {f"{side}.{name}": us for name, us in times.items()},
    )


# Parts of a step by single calls, in the order in which they are drawn.
ATTRIBUTED = (
    "schedule_without_build_meta",
    "build_meta",
    "bind",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "execute_model_rest",
    "update",
    "other",
)
IN_WORKER = ("bind", "start_load_kv", "wait_for_save", "get_finished")


def attributed(means: Mapping[str, float | None]) -> dict[str, float | None]:
    """Split a step of these mean times, all in us, into ATTRIBUTED, and add `step`.

    A part that was not measured is None, and counts as 0. `other` is output handling
    between the model and update_from_output, and queueing.
    """
    us = {name: value or 0.0 for name, value in means.items()}
    calls_us = sum(us[f"{name}_us"] for name in IN_WORKER)
    spans_us = us["schedule_us"], us["execute_model_us"], us["update_us"]
    parts = {
        "schedule_without_build_meta": us["schedule_us"] - us["build_meta_us"],
        "build_meta": means["build_meta_us"],
        **{name: means[f"{name}_us"] for name in IN_WORKER},
        "execute_model_rest": us["execute_model_us"] - calls_us,
        "update": means["update_us"],
        "other": us["step_us"] - spans_us[0] - spans_us[1] - spans_us[2],
        "step": us["step_us"],
    }
    return {k: None if v is None else round(v, 3) for k, v in parts.items()}
