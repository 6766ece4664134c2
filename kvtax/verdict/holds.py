# SPDX-License-Identifier: Apache-2.0
"""The table of holds, on which every statement rests: a row for each hold of a config.

Columns: `repeat`, `hold`, `level`, `many` (1 with many requests); the means of
`cache_blocks`, `age_s` and `time_s`; each metric of kvtax.verdict.metrics, the self
time of each method of the connector and the CPU time of each thread, in us per step;
`own`, vLLM's own work in a step; `waited`, how long
the engine's thread waited for a core, and `engine`, its CPU time; `steps` and `long`,
how many steps took 1 ms more than usual.

Own work is the rest of the engine's step: without schedule(), update_from_output(), the
connector's calls, and the model's sleep as it was measured in that very step. With a
real model it is the thread's CPU time without these. The median over decode-only steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from kvtax.records.per_config import RareSteps
from kvtax.records.profile import Ladder
from kvtax.records.requests import (
    DECODERS,
    EVENT_REQUESTS,
    Phase,
    RequestRecord,
    place_of,
)
from kvtax.stats.held import Holds
from kvtax.stats.quantiles import tpot_of
from kvtax.stats.resampling import chance_of_rise
from kvtax.steps.parts import method_columns
from kvtax.steps.trial_steps import READING_SCHEMA, THREAD
from kvtax.verdict.metrics import (
    AFTER_IDLE,
    CALLS,
    CALLS_MANY,
    HIT,
    LONG_PROMPT,
    MEMORY,
    METRICS,
    PREFILL,
    PROCESSES,
    SCHEDULE,
    STEP,
    THREADS,
    TIMED,
    TIMED_MANY,
    TPOT,
)

PLACE = ("repeat", "hold", "level")
# The part that is cut off at the slow end of `timed`: stalls of the machine.
SLOWEST = 0.1
LONG_US = 1_000.0
CHANCE = 0.001
OWN, REST = "own", "rest"
EVENTS = {AFTER_IDLE: Phase.AFTER_IDLE, HIT: Phase.HIT, LONG_PROMPT: Phase.LONG}
# Of numbers in a table of holds.
DIGITS = 3


def held_steps(steps: pl.DataFrame, ladder: Ladder) -> pl.DataFrame:
    """Select the steps of holds; `whole` are those in which all decoders run.

    `many` is whether those are the ladder's `many_decoders`.
    """
    # Older drivers did not name the requests of a hold.
    decoders = pl.col("decoders").replace(0, ladder.decoders)
    return steps.filter(pl.col("phase") == Phase.HOLD).with_columns(
        (decoders > ladder.decoders).alias("many"),
        (pl.col("batch") >= decoders).alias("whole"),
    )


def hold_table(
    steps: pl.DataFrame,
    readings: pl.DataFrame,
    tpot_us: pl.DataFrame,
    ladder: Ladder,
) -> pl.DataFrame:
    """Tabulate the holds of a config from the steps of all phases.

    `readings` are those of kvtax.steps.trial_steps, `tpot_us` that of `tpot_of_holds`.
    """
    held = held_steps(steps, ladder)
    whole = held.filter("whole")
    parts = [
        _calls(held, CALLS, many=False),
        _calls(held, CALLS_MANY, many=True),
        _usual(whole, TIMED, many=False),
        _usual(whole, TIMED_MANY, many=True),
        _mean(whole.filter("prefills", ~pl.col("many")), "connector_us", PREFILL),
        *(_trimmed(whole, f"{name}_us", name) for name in (SCHEDULE, STEP)),
        _own(whole),
        *(_event(steps, name, phase) for name, phase in EVENTS.items()),
        *(
            _mean(held.filter(~pl.col("many")), name, name.removesuffix("_us"))
            for name in method_columns(held)
        ),
        _of_readings(readings),
        tpot_us,
        long_steps(whole),
    ]
    table = _places(whole)
    for part in parts:
        table = table.join(part, on=PLACE, how="left")
    few = pl.when(~pl.col("many"))
    beside = [n for n in table.columns if n.startswith(THREAD)]
    table = table.with_columns(
        few.then(name).alias(name) for name in (THREADS, PROCESSES, TPOT, *beside)
    )
    return table.sort(PLACE).with_columns(
        pl.col("many").cast(pl.Int64),
        pl.col(pl.Float32, pl.Float64).cast(pl.Float64).round(DIGITS),
    )


def as_table(
    columns: Mapping[str, Sequence[float | None]], forward_us: float
) -> pl.DataFrame:
    """Read a table of holds from a file's columns.

    Older files have no `own`: there it is `rest` without the `forward_us` that the
    model was to sleep.
    """
    table = pl.DataFrame(dict(columns), schema=dict.fromkeys(columns, pl.Float64))
    if OWN not in table.columns and REST in table.columns:
        table = table.with_columns((pl.col(REST) - forward_us).alias(OWN))
    return table.cast(dict.fromkeys((*PLACE, "many", "steps", "long"), pl.Int64))


def metric_holds(rows: pl.DataFrame, name: str) -> Holds | None:
    """Select the holds that have a column, in its unit; None without any."""
    if name not in rows.columns:
        return None
    own = pl.when(pl.col(OWN) > 0).then(OWN)
    few = pl.when(pl.col(OWN) > 0, pl.col("many") == 0).then(OWN)
    unit = {
        "own work of the hold": own,
        "own work of the server": few.median().over("repeat"),
        "MiB": pl.lit(1.0),
    }[METRICS[name].of if name in METRICS else "own work of the hold"]
    rows = rows.with_columns((pl.col(name) / unit).alias("value"))
    rows = rows.filter(pl.col("value").is_finite()).sort(PLACE)
    if not rows.height:
        return None
    return Holds(
        server=rows["repeat"].cast(pl.Int64).to_numpy(),
        level=rows["level"].cast(pl.Int64).to_numpy(),
        x=rows["cache_blocks"].cast(pl.Float64).to_numpy() / 1_000,
        time_s=rows["time_s"].cast(pl.Float64).to_numpy(),
        age_s=rows["age_s"].cast(pl.Float64).to_numpy(),
        values=rows["value"].cast(pl.Float64).to_numpy(),
    )


def tpot_of_holds(
    repeat: int, requests: Sequence[RequestRecord], forward_us: float
) -> pl.DataFrame:
    """Tabulate the median TPOT of the requests that decode in each hold, in us.

    Without the `forward_us` that the model is to sleep for each token.
    """
    rows = []
    for request in requests:
        phase = Phase.of(request.phase)
        decodes = phase is Phase.FILL and request.phase.endswith(DECODERS)
        if not decodes or request.status != "ok":
            continue
        if request.first_token_ns is None or request.end_ns is None:
            continue
        first_us, end_us = request.first_token_ns / 1e3, request.end_ns / 1e3
        us = tpot_of(first_us, end_us, request.output_tokens or 0)
        if us is not None:
            place = place_of(request.phase)
            rows.append((repeat, place.number, place.level, us - forward_us))
    schema = {**{name: READING_SCHEMA[name] for name in PLACE}, TPOT: pl.Float64()}
    us_of_requests = pl.DataFrame(rows, schema, orient="row")
    return us_of_requests.group_by(PLACE).agg(pl.col(TPOT).median())


def _places(held: pl.DataFrame) -> pl.DataFrame:
    """Tabulate where and when the holds were."""
    return held.group_by(PLACE).agg(
        pl.col("many").first(),
        pl.col("cache_blocks", "age_s").mean(),
        (pl.col("t_ns").mean() / 1e9).alias("time_s"),
    )


def _own(whole: pl.DataFrame) -> pl.DataFrame:
    """Compute vLLM's own work in the decode-only steps of each hold."""
    overhead = pl.col("overhead_us")
    beside_model = pl.col("step_us") - pl.col("forward_us") - overhead
    own = pl.coalesce(beside_model, pl.col("thread_cpu_us") - overhead)
    decodes = whole.filter("decode_only", own.is_finite())
    return decodes.group_by(PLACE).agg(own.cast(pl.Float64).median().alias(OWN))


def _calls(held: pl.DataFrame, name: str, many: bool) -> pl.DataFrame:
    """Compute the mean of the connector's calls over all steps of each hold."""
    return _mean(held.filter(pl.col("many") == many), "connector_us", name)


def _mean(steps: pl.DataFrame, time: str, name: str) -> pl.DataFrame:
    own = steps.filter(pl.col(time).is_finite())
    return own.group_by(PLACE).agg(pl.col(time).cast(pl.Float64).mean().alias(name))


def _usual(whole: pl.DataFrame, name: str, many: bool) -> pl.DataFrame:
    own = whole.filter(pl.col("many") == many)
    return _without_slowest(own, "overhead_us", name)


def _trimmed(whole: pl.DataFrame, time: str, name: str) -> pl.DataFrame:
    return _without_slowest(whole.filter("decode_only", ~pl.col("many")), time, name)


def _without_slowest(steps: pl.DataFrame, time: str, name: str) -> pl.DataFrame:
    """Compute the mean without the slowest tenth of each hold's steps."""
    us = pl.col(time)
    usual = us.filter(us <= us.quantile(1 - SLOWEST, "equiprobable")).mean()
    own = steps.filter(us.is_finite())
    return own.group_by(PLACE).agg(usual.cast(pl.Float64).alias(name))


def _event(steps: pl.DataFrame, name: str, phase: Phase) -> pl.DataFrame:
    """Sum the connector's calls in what followed each hold, per request."""
    own = steps.filter(pl.col("phase") == phase, pl.col("connector_us").is_finite())
    return own.group_by(PLACE).agg(
        (pl.col("connector_us").cast(pl.Float64).sum() / EVENT_REQUESTS[phase]).alias(
            name
        )
    )


def _of_readings(readings: pl.DataFrame) -> pl.DataFrame:
    threads = [name for name in readings.columns if name.startswith(THREAD)]
    known = pl.col(PROCESSES).is_not_null()
    summed = pl.sum_horizontal(threads) if threads else pl.lit(0.0)
    return readings.select(
        *PLACE,
        pl.when(known).then(summed).alias(THREADS),
        *(PROCESSES, "engine", "waited", MEMORY, *threads),
    )


def long_steps(whole: pl.DataFrame) -> pl.DataFrame:
    """Count the steps of each hold with few decoders, and the long ones.

    Long is one in which the connector's calls (without a connector, scheduler and
    calls) took LONG_US more than usual in its hold.
    """
    own = whole.filter(~pl.col("many"))
    with_calls = own["connector_us"].null_count() < own.height
    time = pl.col("connector_us" if with_calls else "overhead_us")
    own = own.filter(time.is_finite())
    long = (time > time.median().over(PLACE) + LONG_US).alias("long")
    return (
        own.with_columns(long)
        .group_by(PLACE)
        .agg(pl.len().alias("steps"), pl.col("long").sum())
    )


def rare_steps(holds: pl.DataFrame) -> RareSteps | None:
    """Count the long steps of a table of holds by level; None without any holds."""
    own = holds.filter(pl.col("steps").is_not_null())
    if not own.height:
        return None
    levels = own.group_by("level").agg(pl.col("long", "steps").sum()).sort("level")
    return RareSteps(
        longer_by_us=LONG_US,
        steps=levels["steps"].cast(pl.Int64).to_list(),
        long=levels["long"].cast(pl.Int64).to_list(),
        chance=chance_of_rise(
            own["long"].cast(pl.Float64).to_numpy(),
            own["cache_blocks"].cast(pl.Float64).to_numpy(),
            own["repeat"].cast(pl.Int64).to_numpy(),
        ),
    )


def own_us(rows: pl.DataFrame) -> float | None:
    """Return the median of own work over the holds with few requests, in us."""
    if OWN not in rows.columns:
        return None
    own = rows.filter(pl.col("many") == 0)[OWN].drop_nulls().to_numpy()
    return float(np.median(own)) if len(own) else None
