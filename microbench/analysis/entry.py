# SPDX-License-Identifier: Apache-2.0
"""The entry of one config in per_config.json, before it is compared with others."""

from __future__ import annotations

from typing import Any

import polars as pl

from lab.records.per_config import ConfigEntry, NoiseFloor
from lab.records.phases import Phase
from lab.records.trial import ReadCounts
from lab.stats.interval import stated
from microbench.analysis import latency
from microbench.analysis.levels import Level, Window
from microbench.analysis.measured import Measured
from microbench.analysis.metrics import LEVELS, METRICS
from microbench.analysis.parts import parts_entry
from microbench.analysis.trials import LoadedTrial
from microbench.analysis.verdict import (
    linearity,
    metric_verdict,
    overall_verdict,
    reset_check,
)

METHODS = (
    "build_meta_us",
    "update_us",
    "get_finished_us",
    "start_load_kv_us",
    "bind_us",
    "wait_for_save_us",
    "execute_model_us",
)


def config_entry(
    trials: list[LoadedTrial],
    one: Measured | None,
    window: Window | None,
    noise: NoiseFloor,
) -> ConfigEntry:
    """What was found of the config of `trials`; `one` is None if none has steps."""
    told = {
        **latency.latencies_ms(trials),
        "requests": latency.request_counts(trials),
        "lag_ms": latency.send_lag_ms(trials),
        "records": record_counts(trials),
        "reads": read_counts(trials),
    }
    if one is None:
        return ConfigEntry(
            slope_us_per_1k_blocks=dict.fromkeys(METRICS),
            verdict_of=dict.fromkeys(METRICS, "failed"),
            error="; ".join(f"r{t.repeat}: {t.error or 'no steps'}" for t in trials),
            **told,
        )
    errors = [f"r{t.repeat}: {t.error}" for t in trials if t.error]
    return ConfigEntry(
        n_decode_steps=one.steps.height,
        n_repeats=sum(t.error is None for t in trials),
        cache_blocks=cache_reach(one.steps),
        error="; ".join(errors) or None,
        **levels(one.level, window),
        **growth(one, noise),
        **parts_entry(one.growth, one.threads, one.parts),
        **told,
    )


def cache_reach(steps: pl.DataFrame) -> dict[str, int]:
    """The lowest and the highest |cache| before the reset."""
    before = steps.lazy().filter(pl.col("phase") < Phase.AFTER_RESET)
    blocks = pl.col("cache_blocks")
    return (
        before.select(min=blocks.min(), max=blocks.max()).collect().row(0, named=True)
    )


def levels(level: Level | None, window: Window | None) -> dict[str, Any]:
    """Quantiles and attribution at the stated |cache|; nothing where there is none."""
    if level is None or window is None:
        return {}
    at = {"at_cache_blocks": window.at_cache_blocks}
    return {
        "n_window_steps": level.steps.height,
        **{
            told.time: at | (level.quantiles(told.time) or {})
            for told in LEVELS.values()
        },
        **{time: level.quantiles(time) for time in METHODS},
        "attribution_us": level.attribution_us(),
    }


def growth(one: Measured, noise: NoiseFloor) -> dict[str, Any]:
    """Slopes, what became of the cost at the reset, and the verdicts from both."""
    facts = one.reset.facts()
    checks = {metric: reset_check(metric, one) for metric in one.metrics}
    verdicts = {
        metric: metric_verdict(
            one.slopes[metric],
            one.falls[metric],
            noise.slope_floor(metric),
            noise.fall_floor(metric),
            METRICS[metric].margin_us_per_1k_blocks,
        )
        for metric in one.metrics
    }
    slope = one.slopes["schedule"]
    return {
        "slope_us_per_1k_blocks": {
            metric: stated(estimate, 3) for metric, estimate in one.slopes.items()
        },
        "reset_check": checks | facts if facts else None,
        "linearity": slope and linearity(one.cells, "schedule_us", slope),
        "verdict_of": verdicts,
        "verdict": overall_verdict(verdicts),
    }


def record_counts(trials: list[LoadedTrial]) -> dict[str, int]:
    """How many records were read, missed and torn."""
    names = ("engine_steps", "worker_steps", "engine_without_worker", "torn_lines")
    return {name: sum(getattr(t, name) for t in trials) for name in names}


def read_counts(trials: list[LoadedTrial]) -> ReadCounts | None:
    """What peers read from the servers; None where no peer was to read."""
    found = [t.facts.reads for t in trials if t.facts and t.facts.reads]
    if not found:
        return None
    return ReadCounts(
        **{
            name: sum(getattr(reads, name) for reads in found)
            for name in ReadCounts.__struct_fields__
        }
    )
