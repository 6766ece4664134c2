# SPDX-License-Identifier: Apache-2.0
"""Measurements of one config that need no comparison, from its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import polars as pl

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import (
    Curve,
    LongCalls,
    Measured,
    PartCost,
)
from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.records.run import IdleCost, ReadCounts
from kvtax.stats.quantiles import quantiles, slope_within_groups
from kvtax.steps.parts import CALLS, attributed, method_columns
from kvtax.steps.trial_steps import STEP_TIMES, THREAD
from kvtax.verdict import latency
from kvtax.verdict.holds import held_steps
from kvtax.verdict.trials import LoadedTrial

# Quantiles of 100,000 steps are as good as of millions; every k-th step is kept.
MAX_STEPS = 100_000
# A call of the connector is long that took so much more than usual.
LONG_CALL_US = 10_000.0
# A stall of the machine takes no CPU time of the thread, a slow call does.
CPU_SHARE = 0.5
# But CPU clocks go on while the hypervisor runs others: with more of it nobody knows.
MOST_STOLEN = 0.02
BINS, LEAST_STEPS_OF_BIN = 30, 20


def measured(
    trials: Sequence[LoadedTrial], steps: pl.DataFrame | None, ladder: Ladder
) -> Measured:
    """Measure the config of `trials`; `steps` are those of all its good trials."""
    latencies = latency.latencies_ms(trials)
    errors = [f"r{t.repeat}: {t.error}" for t in trials if t.error]
    facts = Measured(
        requests=latency.request_counts(trials),
        lag_ms=latency.send_lag(trials),
        records=record_counts(trials),
        reads=read_counts(trials),
        idle=idle_cost(trials),
        pss_mib=pss_mib(trials),
        ttft_ms=latencies["ttft_ms"],
        tpot_ms=latencies["tpot_ms"],
        e2e_ms=latencies["e2e_ms"],
        error="; ".join(errors) or None,
        n_repeats=sum(t.error is None for t in trials),
        threads=_threads(trials, ladder),
    )
    if steps is None:
        facts.error = facts.error or "no steps"
        return facts
    stolen = [trial.repeat for trial in trials if _steal_share(trial) > MOST_STOLEN]
    unstolen = steps.filter(~pl.col("repeat").is_in(stolen))
    facts = msgspec.structs.replace(facts, long_calls=long_calls(unstolen))
    return _with_steps(facts, steps, ladder)


def _steal_share(trial: LoadedTrial) -> float:
    load = trial.facts.machine if trial.facts else None
    return load.steal_share if load else 0.0


def _with_steps(facts: Measured, steps: pl.DataFrame, ladder: Ladder) -> Measured:
    decodes = steps.filter("decode_only")
    held = held_steps(steps, ladder).filter(
        "whole", ~pl.col("many"), pl.col("level") == ladder.stated_level
    )
    stated = thin(held.filter("decode_only"), MAX_STEPS)
    methods = {
        name.removesuffix("_us"): _part(held, name) for name in method_columns(held)
    }
    return msgspec.structs.replace(
        facts,
        n_decode_steps=decodes.height,
        cache_blocks=_reach(decodes),
        n_window_steps=stated.height,
        schedule_us=quantiles(stated["schedule_us"]),
        step_us=quantiles(stated["step_us"]),
        build_meta_us=quantiles(stated["build_meta_us"]),
        get_finished_us=quantiles(stated["get_finished_us"]),
        attribution_us=attribution_us(stated) if stated.height else None,
        connector=_part(held, "connector_us"),
        methods={name: part for name, part in methods.items() if part},
    )


def thin(steps: pl.DataFrame, most: int) -> pl.DataFrame:
    """Keep every k-th step, so that at most `most` are left."""
    every = -(-steps.height // most) if steps.height else 1
    return steps if every == 1 else steps.gather_every(every)


def _reach(steps: pl.DataFrame) -> dict[str, int] | None:
    blocks = steps["cache_blocks"].drop_nulls().to_numpy()
    if not len(blocks):
        return None
    return {"min": int(blocks.min()), "max": int(blocks.max())}


def attribution_us(steps: pl.DataFrame) -> dict[str, float | None]:
    """Return mean parts of the middle half of the steps, which sum to their step time.

    The mean over the steps whose step_us lies between its 25th and 75th percentile
    (interquartile mean): means add up, and the tails are out.
    """
    executed = steps.filter(pl.col("execute_model_us").is_not_null())
    whole = executed if executed.height else steps
    low, high = (whole["step_us"].quantile(q, "equiprobable") for q in (0.25, 0.75))
    middle = whole.filter(pl.col("step_us").is_between(low, high))
    return attributed({name: _mean(middle[name]) for name in STEP_TIMES})


def _mean(us: pl.Series) -> float | None:
    """Return the mean, where null counts as 0; None where nothing was measured."""
    if us.null_count() == len(us):
        return None
    return float(us.cast(pl.Float64).fill_null(0).to_numpy().mean())


def _part(held: pl.DataFrame, time: str) -> PartCost | None:
    us = held[time].drop_nulls().cast(pl.Float64).to_numpy()
    if not len(us):
        return None
    calls = time.removesuffix("_us") + CALLS
    per_step = None
    if calls in held.columns:
        per_step = round(float(held[calls].fill_null(0).sum()) / held.height, 3)
    return PartCost(
        calls_per_step=per_step, us_per_step=round(float(us.sum()) / held.height, 3)
    )


def _threads(trials: Sequence[LoadedTrial], ladder: Ladder) -> dict[str, PartCost]:
    readings = [t.readings for t in trials if t.readings is not None]
    if not readings:
        return {}
    at = pl.concat(readings, how="diagonal").filter(
        pl.col("level") == ladder.stated_level, pl.col("decoders") <= ladder.decoders
    )
    return {
        name.removeprefix(THREAD): PartCost(us_per_step=round(float(us.mean()), 3))
        for name in at.columns
        if name.startswith(THREAD) and len(us := at[name].drop_nulls().to_numpy())
    }


def long_calls(steps: pl.DataFrame) -> LongCalls | None:
    """Count the steps in which the connector's calls took LONG_CALL_US over the usual.

    None without a connector, and where no step has a CPU time.
    """
    us = pl.col("connector_us")
    known = _with_cpu(steps.filter(us.is_finite()))
    if not known.height or known["thread_cpu_us"].null_count() == known.height:
        return None
    over = known.with_columns((us - us.median().over("repeat")).alias("over_us"))
    long = over.filter(
        pl.col("over_us") >= LONG_CALL_US,
        pl.col("cpu_us") >= CPU_SHARE * pl.col("over_us"),
    )["over_us"].to_numpy()
    return LongCalls(
        count=len(long),
        longest_ms=round(float(long.max(initial=0.0)) / 1e3, 3),
        us_per_step=round(float(long.sum()) / known.height, 3),
        steps=known.height,
    )


def _with_cpu(steps: pl.DataFrame) -> pl.DataFrame:
    """Add `cpu_us`, the CPU time of the engine's thread in a step, where it is known.

    After a long step the clock may tell of all steps since it was read before: what
    the others took is left out, their sleep aside.
    """
    host_us = pl.col("step_us").cast(pl.Float64) - pl.col("forward_us").fill_null(0)
    until = host_us.fill_null(0).cum_sum().over("repeat")
    read = pl.col("thread_cpu_us").is_not_null()
    last_read = pl.when(read).then(until).forward_fill().shift(1).over("repeat")
    others_us = until.shift(1).over("repeat") - last_read
    is_drawn = pl.col("schedule_cpu_us").is_not_null()
    cpu_us = pl.col("thread_cpu_us") - pl.when(is_drawn).then(0.0).otherwise(others_us)
    return steps.sort("repeat", "t_ns").with_columns(cpu_us.alias("cpu_us"))


def growth_curve(steps: pl.DataFrame) -> Curve | None:
    """Bin schedule() of the growth phase by |cache|; None without growth."""
    growth = _growth(steps)
    if not growth.height:
        return None
    width = max(float(growth["cache_blocks"].to_numpy().max()), 1.0) / BINS
    us = pl.col("schedule_us")
    bins = (
        growth.group_by((pl.col("cache_blocks") // width).clip(0, BINS - 1).alias("n"))
        .agg(
            pl.len().alias("steps"),
            *(
                us.quantile(q, "equiprobable").cast(pl.Float64).round(3).alias(name)
                for name, q in (("p25", 0.25), ("p50", 0.5), ("p75", 0.75))
            ),
        )
        .filter(pl.col("steps") >= LEAST_STEPS_OF_BIN)
        .sort("n")
    )
    if not bins.height:
        return None
    return Curve(
        cache_blocks=((bins["n"] + 0.5) * width).round(1).to_list(),
        p25_us=bins["p25"].to_list(),
        p50_us=bins["p50"].to_list(),
        p75_us=bins["p75"].to_list(),
    )


def growth_slope(steps: pl.DataFrame) -> Estimate | None:
    """Return the slope of schedule() in growth, in us per 1,000 blocks; no interval.

    From medians by batch size and |cache|: the batch grows with the cache.
    """
    growth = _growth(steps)
    if growth.height < LEAST_STEPS_OF_BIN:
        return None
    width = max(float(growth["cache_blocks"].to_numpy().max()), 1.0) / BINS
    cells = growth.group_by(
        "repeat", "batch", (pl.col("cache_blocks") // width).alias("bin")
    ).agg(pl.col("cache_blocks", "schedule_us").median(), pl.len().alias("steps"))
    slope = slope_within_groups(
        cells["cache_blocks"].cast(pl.Float64).to_numpy() / 1_000,
        cells["schedule_us"].cast(pl.Float64).to_numpy(),
        cells["steps"].cast(pl.Float64).to_numpy(),
        cells.select(pl.struct("repeat", "batch").rank("dense")).to_series().to_numpy(),
    )
    return None if slope is None else Estimate(round(slope, 3))


def _growth(steps: pl.DataFrame) -> pl.DataFrame:
    return steps.filter(
        "decode_only",
        pl.col("phase") == Phase.GROWTH,
        pl.col("schedule_us").is_finite(),
        pl.col("cache_blocks").is_not_null(),
    )


def record_counts(trials: Sequence[LoadedTrial]) -> dict[str, int]:
    """Count the records that were read, missing and torn."""
    names = ("engine_steps", "worker_steps", "engine_without_worker", "torn_lines")
    return {name: sum(getattr(t, name) for t in trials) for name in names}


def read_counts(trials: Sequence[LoadedTrial]) -> ReadCounts | None:
    """Sum the reads of peers; None if no peer was to read."""
    counts = [t.facts.reads for t in trials if t.facts and t.facts.reads]
    if not counts:
        return None
    return ReadCounts(
        reads=sum(count.reads for count in counts),
        blocks_offered=sum(count.blocks_offered for count in counts),
        blocks_valid=sum(count.blocks_valid for count in counts),
        seconds=sum(count.seconds for count in counts),
    )


def idle_cost(trials: Sequence[LoadedTrial]) -> IdleCost | None:
    """Sum what idle servers took; None if none was watched."""
    costs = [t.facts.idle for t in trials if t.facts and t.facts.idle]
    if not costs:
        return None
    return IdleCost(
        seconds=sum(cost.seconds for cost in costs),
        cpu_s=round(sum(cost.cpu_s for cost in costs), 3),
        steps=sum(cost.steps for cost in costs),
    )


def pss_mib(trials: Sequence[LoadedTrial]) -> float | None:
    """Compute the mean over servers of their memory (PSS); None if none was watched."""
    mib = [t.facts.pss_mib for t in trials if t.facts and t.facts.pss_mib]
    return round(float(np.mean(mib)), 1) if mib else None


def steps_of_configs(
    by_config: Mapping[str, Sequence[LoadedTrial]],
) -> dict[str, pl.DataFrame]:
    """Put the steps of every config together that has any, by name."""
    together = {}
    for name, trials in by_config.items():
        tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
        if tables:
            together[name] = pl.concat(tables, how="diagonal", rechunk=False)
    return together
