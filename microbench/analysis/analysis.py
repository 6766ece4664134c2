# SPDX-License-Identifier: Apache-2.0
"""A run's trials to the document per_config.json (its fields: docs/records.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from lab.records.per_config import PER_CONFIG_SCHEMA
from lab.records.phases import Phase
from lab.records.run import RunRecord
from lab.records.trial import ReadCounts
from lab.stats.estimate import SEED, Estimate
from lab.stats.interval import stated
from lab.stats.slope import Cells, make_cells, slope_us_per_1k_blocks
from microbench.analysis import latency
from microbench.analysis.levels import Level, Window, choose_window
from microbench.analysis.roles import Roles, roles_of
from microbench.analysis.speed import at_usual_speed
from microbench.analysis.steps import LoadedTrial
from microbench.analysis.verdict import (
    METRICS,
    linearity,
    metric_verdict,
    overall_verdict,
    reset_check,
)
from microbench.analysis.warn import config_warnings, run_warnings

METHODS = (
    "build_meta_us",
    "update_us",
    "get_finished_us",
    "start_load_kv_us",
    "bind_us",
    "wait_for_save_us",
    "execute_model_us",
)


@dataclass
class Measured:
    """One config's steps and what was estimated from them."""

    name: str
    trials: list[LoadedTrial]
    steps: pl.DataFrame
    cells: Cells
    slopes: dict[str, Estimate | None]
    seed: int
    level: Level | None = None


@dataclass(frozen=True)
class Analysis:
    """The document, the parts of its configs, and the steps for the figures."""

    document: dict[str, Any]
    roles: Roles
    measured: dict[str, Measured]
    window: Window | None


def analyse(run: RunRecord, trials: list[LoadedTrial], commit: str | None) -> Analysis:
    """Everything per_config.json states about a run."""
    by_config: dict[str, list[LoadedTrial]] = {}
    for trial in trials:
        by_config.setdefault(trial.config, []).append(trial)
    measured = {
        # Seeds apart, so that the draws of two configs are independent.
        name: measure(name, group, SEED + 10 * index, run.profile)
        for index, (name, group) in enumerate(by_config.items())
        if any(trial.steps is not None and trial.steps.height for trial in group)
    }
    window, warnings = choose_window({n: m.steps for n, m in measured.items()})
    for one in measured.values():
        if window is not None:
            level = Level(window.select(one.steps), window.mix)
            one.level = level if level.steps.height else None
    roles = roles_of(run, by_config)
    noise = noise_floor(measured, roles)
    configs = {
        name: describe(measured[name], window, noise)
        if name in measured
        else failed(group)
        for name, group in by_config.items()
    }
    compare_with_baseline(configs, measured, roles.baseline, noise, run)
    compare_with_floor(configs, measured, roles.floor)
    document = {
        "schema": PER_CONFIG_SCHEMA,
        "provenance": run.provenance | {"report_git_commit": commit},
        "profile": run.profile,
        "window": None
        if window is None
        else {
            "at_cache_blocks": window.at_cache_blocks,
            "batch_mix": {str(b): round(s, 4) for b, s in window.mix.items()},
            "requests_to_fill": latency.requests_to_fill(
                window.at_cache_blocks, trials, _block_size(trials)
            ),
        },
        "noise_floor": noise,
        "warnings": warnings + run_warnings(run, roles, noise),
        "configs": configs,
    }
    return Analysis(document, roles, measured, window)


def measure(
    name: str, trials: list[LoadedTrial], seed: int, profile: dict[str, Any]
) -> Measured:
    """Steps of the trials that went well, cells and slopes of the growth phase."""
    tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
    steps = pl.concat(tables, rechunk=False)
    growth = steps.filter(pl.col("phase") == Phase.GROWTH)
    if profile.get("null_model"):
        growth = at_usual_speed(growth, float(profile.get("forward_us") or 0))
    times = tuple(METRICS.values())
    cells = make_cells(growth.select("repeat", "batch", "cache_blocks", *times), times)
    slopes = {
        metric: slope_us_per_1k_blocks(cells, time, seed)
        for metric, time in METRICS.items()
    }
    return Measured(name, trials, steps, cells, slopes, seed)


def describe(
    one: Measured, window: Window | None, noise: dict[str, Any]
) -> dict[str, Any]:
    """The entry of one config in per_config.json, less its comparison with plain."""
    before = one.steps.lazy().filter(pl.col("phase") < Phase.AFTER_RESET)
    low, high = (
        before.select(
            pl.col("cache_blocks").min().alias("low"),
            pl.col("cache_blocks").max().alias("high"),
        )
        .collect()
        .row(0)
    )
    check = reset_check(one.steps, one.slopes, one.seed)
    verdicts = {
        metric: metric_verdict(
            one.slopes[metric],
            None if check is None else check[metric],
            (noise["slope_us_per_1k_blocks"] or {}).get(metric, {}).get("floor", 0.0),
        )
        for metric in METRICS
    }
    slope = one.slopes["schedule"]
    errors = [f"r{t.repeat}: {t.error}" for t in one.trials if t.error]
    entry = {
        "n_decode_steps": one.steps.height,
        "n_repeats": sum(t.error is None for t in one.trials),
        "cache_blocks": {"min": low, "max": high},
        "slope_us_per_1k_blocks": {
            metric: stated(estimate, 3) for metric, estimate in one.slopes.items()
        },
        **level_entry(one.level, window),
        **latency.latencies_ms(one.trials),
        "requests": latency.request_counts(one.trials),
        "lag_ms": latency.send_lag_ms(one.trials),
        "records": record_counts(one.trials),
        "reads": read_counts(one.trials),
        "reset_check": check,
        "linearity": slope and linearity(one.cells, "schedule_us", slope),
        "verdict_of": verdicts,
        "verdict": overall_verdict(verdicts),
        "error": "; ".join(errors) or None,
    }
    entry["warnings"] = config_warnings(entry, one.steps)
    return entry


def level_entry(level: Level | None, window: Window | None) -> dict[str, Any]:
    """Quantiles and attribution at the stated |cache|; None where there is none."""
    if level is None or window is None:
        return dict.fromkeys((*METRICS.values(), *METHODS, "attribution_us")) | {
            "n_window_steps": 0
        }
    at = {"at_cache_blocks": window.at_cache_blocks}
    entry: dict[str, Any] = {"n_window_steps": level.steps.height}
    for time in METRICS.values():
        entry[time] = at | (level.quantiles(time) or {})
    for time in METHODS:
        entry[time] = level.quantiles(time)
    return entry | {"attribution_us": level.attribution_us()}


def failed(trials: list[LoadedTrial]) -> dict[str, Any]:
    """The entry of a config without a single usable trial: same keys, no numbers."""
    errors = "; ".join(f"r{t.repeat}: {t.error or 'no steps'}" for t in trials)
    unmeasured = ("cache_blocks", "reset_check", "linearity", "vs_plain", "vs_noop")
    return dict.fromkeys((*unmeasured, "tpot_addition")) | {
        **level_entry(None, None),
        "n_decode_steps": 0,
        "n_repeats": 0,
        "slope_us_per_1k_blocks": dict.fromkeys(METRICS),
        **latency.latencies_ms(trials),
        "requests": latency.request_counts(trials),
        "lag_ms": latency.send_lag_ms(trials),
        "records": record_counts(trials),
        "reads": read_counts(trials),
        "verdict_of": dict.fromkeys(METRICS, "failed"),
        "verdict": "failed",
        "error": errors,
        "warnings": [],
    }


def record_counts(trials: list[LoadedTrial]) -> dict[str, int]:
    """How many records were read, missed and torn."""
    names = ("engine_steps", "worker_steps", "engine_without_worker", "torn_lines")
    return {name: sum(getattr(t, name) for t in trials) for name in names}


def read_counts(trials: list[LoadedTrial]) -> dict[str, float] | None:
    """What peers read from the servers; None where none was to."""
    found = [t.facts.reads for t in trials if t.facts and t.facts.reads]
    if not found:
        return None
    return {
        name: sum(getattr(reads, name) for reads in found)
        for name in ReadCounts.__struct_fields__
    }


def noise_floor(measured: dict[str, Measured], roles: Roles) -> dict[str, Any]:
    """How far two runs of the same thing, the baseline and its twin, are apart.

    `floor` is the far end of the difference's interval: a difference between two
    configs that is smaller is within noise. None where the pair was not run.
    """
    pair = [name for name in (roles.baseline, roles.twin) if name in measured]
    if len(pair) < 2:
        return {"pair": None, "slope_us_per_1k_blocks": None, "p50_us": None}
    first, second = measured[pair[0]], measured[pair[1]]
    slopes, levels = {}, {}
    for metric, time in METRICS.items():
        a, b = first.slopes[metric], second.slopes[metric]
        if a is not None and b is not None:
            slopes[metric] = _floor(b.minus(a))
        a, b = p50(first, time), p50(second, time)
        if a is not None and b is not None:
            levels[metric] = _floor(b.minus(a))
    return {
        "pair": pair,
        "slope_us_per_1k_blocks": slopes or None,
        "p50_us": levels or None,
    }


def _floor(difference: Estimate) -> dict[str, Any]:
    edges = [abs(edge) for edge in difference.ci95]
    return (stated(difference, 3) or {}) | {"floor": round(max(edges), 3)}


def p50(one: Measured, time: str) -> Estimate | None:
    """The median of `time` at the stated |cache|, with its bootstrap."""
    return None if one.level is None else one.level.median(time, one.seed + 2)


def compare_with_baseline(
    configs: dict[str, Any],
    measured: dict[str, Measured],
    baseline: str | None,
    noise: dict[str, Any],
    run: RunRecord,
) -> None:
    """Add `vs_plain` and `tpot_addition` to each measured config."""
    base = measured.get(baseline) if baseline else None
    own_forward_ms = float(run.profile.get("forward_us") or 0.0) / 1e3
    for name, one in measured.items():
        entry = configs[name]
        entry["vs_plain"] = entry["tpot_addition"] = None
        if base is None or one is base:
            continue
        differences = {}
        for metric, time in METRICS.items():
            ours, theirs = p50(one, time), p50(base, time)
            if ours is None or theirs is None:
                continue
            difference = ours.minus(theirs)
            low, high = difference.ci95
            floor = (noise["p50_us"] or {}).get(metric, {}).get("floor", 0.0)
            differences[metric] = (stated(difference, 3) or {}) | {
                "within_noise": low <= 0 <= high or abs(difference.value) <= floor
            }
        entry["vs_plain"] = differences or None
        entry["tpot_addition"] = latency.tpot_addition(
            configs[base.name], entry, own_forward_ms
        )


def compare_with_floor(
    configs: dict[str, Any], measured: dict[str, Measured], floor: str | None
) -> None:
    """Add `vs_noop`, ratios of p50 at the stated |cache|, to each measured config."""
    base = measured.get(floor) if floor else None
    for name, one in measured.items():
        ratios = {}
        for metric, time in METRICS.items():
            if base is None or one is base:
                continue
            ours, theirs = p50(one, time), p50(base, time)
            if ours is not None and theirs is not None:
                ratios[metric] = stated(ours.over(theirs), 3)
        configs[name]["vs_noop"] = ratios or None


def _block_size(trials: list[LoadedTrial]) -> int:
    sizes = [t.facts.block_size for t in trials if t.facts]
    return int(sizes[0]) if sizes else 16
