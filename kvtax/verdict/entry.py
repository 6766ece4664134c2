# SPDX-License-Identifier: Apache-2.0
"""The entry of one config in per_config.json, before it is compared with others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import polars as pl

from kvtax.records.per_config import (
    BaselineDifference,
    ConfigEntry,
    ConfigEvidence,
    HeldTpot,
    NoiseFloor,
    PartCost,
)
from kvtax.records.run import IdleCost, ReadCounts
from kvtax.stats import Estimate
from kvtax.stats.distribution import Distribution, rounded
from kvtax.stats.held import Fit, fit
from kvtax.steps.parts import CALLS, method_columns
from kvtax.verdict import latency
from kvtax.verdict.holds import holds_of, holds_of_cpu
from kvtax.verdict.latency import tpot_addition
from kvtax.verdict.measured import Comparison, ConfigEstimates, ConfigSteps, Level
from kvtax.verdict.metrics import JUDGED, LEVELS, TPOT, Metric, number
from kvtax.verdict.roles import Roles
from kvtax.verdict.trials import LoadedTrial
from kvtax.verdict.verdict import (
    held_levels,
    judge_all,
    judge_rare,
    overall_verdict,
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
    steps: ConfigSteps | None,
    at_cache_blocks: int | None,
) -> ConfigEntry:
    """Build the entry of the config of `trials`, but its verdicts."""
    entry = ConfigEntry(
        slope_us_per_1k_blocks=dict.fromkeys(JUDGED),
        verdict_of=dict.fromkeys(JUDGED, "failed"),
        requests=latency.request_counts(trials),
        lag_ms=latency.send_lag_ms(trials),
        records=record_counts(trials),
        reads=read_counts(trials),
        idle=idle_cost(trials),
        pss_mib=pss_mib(trials),
    )
    for time, quantiles in latency.latencies_ms(trials).items():
        setattr(entry, time, quantiles)
    if steps is None:
        errors = [f"r{t.repeat}: {t.error or 'no steps'}" for t in trials]
        entry.error = "; ".join(errors)
        return entry
    errors = [f"r{t.repeat}: {t.error}" for t in trials if t.error]
    entry.error = "; ".join(errors) or None
    entry.n_decode_steps = steps.decodes.height
    entry.n_repeats = sum(t.error is None for t in trials)
    entry.cache_blocks = cache_reach(steps.decodes)
    if steps.level and at_cache_blocks is not None:
        _set_levels(entry, steps.level, at_cache_blocks)
    set_parts(entry, steps)
    return entry


def cache_reach(steps: pl.DataFrame) -> dict[str, int]:
    """Return the lowest and the highest |cache|."""
    blocks = steps["cache_blocks"]
    return {
        "min": round(number(blocks.min())),
        "max": round(number(blocks.max())),
    }


def _set_levels(entry: ConfigEntry, level: Level, at_cache_blocks: int) -> None:
    """Fill in quantiles and attribution at the stated |cache|."""
    at: dict[str, int | float] = {"at_cache_blocks": at_cache_blocks}
    entry.n_window_steps = level.steps.height
    for metric in LEVELS.values():
        setattr(entry, metric.time, at | (level.quantiles(metric.time) or {}))
    for time in METHODS:
        setattr(entry, time, level.quantiles(time))
    entry.attribution_us = level.attribution_us()


def set_verdicts(
    entry: ConfigEntry,
    evidence: ConfigEvidence,
    found: ConfigEstimates,
    level: float,
    promised: Collection[str],
) -> None:
    """Fill in slopes, levels and the verdicts from them, which hold in `level` of runs.

    `promised` are the metrics without which nothing is flat.
    """
    judged = judge_all(found.fits, level)
    entry.growth_slope_us_per_1k_blocks = evidence.growth_slopes["schedule"]
    slopes = {name: rounded(found.slopes[name]) for name in judged}
    entry.slope_us_per_1k_blocks = entry.slope_us_per_1k_blocks | slopes
    entry.held = {
        name: held_levels(found.fits[name], level, one) for name, one in judged.items()
    }
    entry.rare = found.rare
    judged |= judge_rare(found.rare)
    entry.verdict_of = {name: one.verdict for name, one in judged.items()}
    entry.not_measured = sorted(set(promised) - judged.keys())
    entry.verdict = overall_verdict(entry.verdict_of, promised)


def record_counts(trials: list[LoadedTrial]) -> dict[str, int]:
    """Count the records that were read, missing and torn."""
    names = ("engine_steps", "worker_steps", "engine_without_worker", "torn_lines")
    return {name: sum(getattr(t, name) for t in trials) for name in names}


def read_counts(trials: list[LoadedTrial]) -> ReadCounts | None:
    """Sum the reads of peers; None if no peer was to read."""
    found = [t.facts.reads for t in trials if t.facts and t.facts.reads]
    if not found:
        return None
    return ReadCounts(
        **{
            name: sum(getattr(reads, name) for reads in found)
            for name in ReadCounts.__struct_fields__
        }
    )


def idle_cost(trials: list[LoadedTrial]) -> IdleCost | None:
    """Sum what idle servers took; None if none was watched."""
    found = [t.facts.idle for t in trials if t.facts and t.facts.idle]
    if not found:
        return None
    return IdleCost(
        seconds=sum(one.seconds for one in found),
        cpu_s=round(sum(one.cpu_s for one in found), 3),
        steps=sum(one.steps for one in found),
    )


def pss_mib(trials: list[LoadedTrial]) -> float | None:
    """Compute the mean over servers of their memory (PSS); None if none was watched."""
    found = [t.facts.pss_mib for t in trials if t.facts and t.facts.pss_mib]
    return round(sum(found) / len(found), 1) if found else None


def noise_floor(
    estimates: Mapping[str, ConfigEstimates], comparison: Comparison, roles: Roles
) -> NoiseFloor:
    """Compute the difference of the baseline and its twin, in slope and in level."""
    pair = (roles.baseline or "", roles.twin or "")
    if not all(name in estimates for name in pair):
        return NoiseFloor()
    first, second = (estimates[name] for name in pair)
    slopes = {
        metric: _rounded(second.slopes[metric].minus(slope))
        for metric, slope in first.slopes.items()
        if metric in second.slopes
    }
    levels = {
        metric: found
        for metric in LEVELS
        if (found := comparison.difference_us(pair[1], pair[0], metric))
    }
    return NoiseFloor(pair, slopes or None, levels or None)


def _rounded(found: Distribution) -> Estimate:
    return Estimate.of(found, 3)


def compare_with_baseline(
    entries: Mapping[str, ConfigEntry],
    comparison: Comparison,
    baseline: str | None,
    noise: NoiseFloor,
    own_forward_ms: float,
) -> None:
    """Fill in `vs_plain` and `tpot_addition` of the other measured configs."""
    if baseline is None or baseline not in comparison:
        return
    for name, entry in entries.items():
        if name != baseline and name in comparison:
            entry.vs_plain = {
                metric: BaselineDifference(
                    found.value, found.ci95, within_noise=noise.covers(metric, found)
                )
                for metric in LEVELS
                if (found := comparison.difference_us(name, baseline, metric))
            } or None
            entry.tpot_addition = tpot_addition(
                entries[baseline], entry, own_forward_ms
            )


def compare_with_floor(
    entries: Mapping[str, ConfigEntry], comparison: Comparison, floor: str | None
) -> None:
    """Fill in `vs_noop` of the other measured configs."""
    if floor is None or floor not in comparison:
        return
    for name, entry in entries.items():
        if name != floor and name in comparison:
            ratios = {m: comparison.ratio(name, floor, m) for m in LEVELS}
            entry.vs_noop = {m: r for m, r in ratios.items() if r} or None


def set_held_tpot(
    entries: Mapping[str, ConfigEntry], comparison: Comparison, baseline: str | None
) -> None:
    """Fill in `held_tpot` of the configs of which it is known."""
    for name, entry in entries.items():
        if us := comparison.median_us(name, TPOT):
            over = None
            if baseline is not None and name != baseline:
                over = comparison.difference_us(name, baseline, TPOT)
            entry.held_tpot = HeldTpot(round(us / 1e3, 4), over and _in_ms(over))


def _in_ms(us: Estimate) -> Estimate:
    ci95 = us.ci95 and (round(us.ci95[0] / 1e3, 4), round(us.ci95[1] / 1e3, 4))
    return Estimate(round(us.value / 1e3, 4), ci95)


def set_parts(entry: ConfigEntry, one: ConfigSteps) -> None:
    """Fill in `connector`, `methods` and `threads`: means and slopes of the holds."""
    held = one.held
    if held["connector_us"].null_count() < held.height:
        entry.connector = _part(one, "connector_us")
    entry.methods = {
        name.removesuffix("_us"): _part(one, name) for name in method_columns(held)
    }
    entry.threads = {
        str(name): _thread(one, own)
        for (name,), own in one.cpu.group_by("of", maintain_order=True)
    }


def _part(one: ConfigSteps, time: str) -> PartCost:
    steps = max(one.held.height, 1)
    calls = time.removesuffix("_us") + CALLS
    per_step = None
    if calls in one.held.columns:
        per_step = round(number(one.held[calls].sum()) / steps, 3)
    return PartCost(
        calls_per_step=per_step,
        slope_per_1k_blocks=_slope(_fit(one, time)),
        us_per_step=round(number(one.held[time].sum()) / steps, 3),
    )


def _fit(one: ConfigSteps, time: str) -> Fit | None:
    holds = holds_of(one.held, Metric(time))
    return None if holds is None else fit(holds)


def _thread(one: ConfigSteps, own: pl.DataFrame) -> PartCost:
    steps = max(number(own["steps"].sum()), 1)
    holds = holds_of_cpu(one.held.filter(~pl.col("many")), own)
    return PartCost(
        slope_per_1k_blocks=_slope(None if holds is None else fit(holds)),
        us_per_step=round(number((own["us_per_step"] * own["steps"]).sum()) / steps, 3),
    )


def _slope(found: Fit | None) -> Estimate | None:
    if found is None:
        return None
    slope, error = found.slope()
    reach = found.reach(error)
    return Estimate(round(slope, 3), (round(slope - reach, 3), round(slope + reach, 3)))
