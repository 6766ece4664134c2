# SPDX-License-Identifier: Apache-2.0
"""A run's trials to the document per_config.json (kvtax/records/per_config.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvtax.records.per_config import HostEntry, PerConfig, WindowRecord
from kvtax.records.run import HostRecord, RunRecord
from kvtax.records.warning import RunWarning
from kvtax.stats.processes import look_level
from kvtax.verdict.entry import (
    compare_with_baseline,
    compare_with_floor,
    config_entry,
    noise_floor,
    set_verdicts,
)
from kvtax.verdict.latency import requests_to_fill, send_lag_ms
from kvtax.verdict.levels import Level
from kvtax.verdict.machine import machine_entry
from kvtax.verdict.measured import (
    Comparison,
    ConfigEstimates,
    measure_all,
    promised_metrics,
)
from kvtax.verdict.roles import Roles, roles_of
from kvtax.verdict.trials import LoadedTrial
from kvtax.verdict.warnings import (
    config_warnings,
    growth_alone,
    run_warnings,
    undecided,
)


@dataclass(frozen=True)
class Analysis:
    """The document, and what the summary and the figures need beside it.

    `warnings` are the document's warnings by config, those of the run under None.
    """

    document: PerConfig
    roles: Roles
    warnings: dict[str | None, list[RunWarning]]
    measured: dict[str, ConfigEstimates]


def analyse(run: RunRecord, trials: list[LoadedTrial], commit: str | None) -> Analysis:
    """Compute the whole per_config.json of a run."""
    by_config: dict[str, list[LoadedTrial]] = {}
    for trial in trials:
        by_config.setdefault(trial.config, []).append(trial)
    roles = roles_of(run, by_config)
    measured = measure_all(by_config, run.profile)
    at_blocks = stated_cache_blocks(measured)
    comparison = Comparison(measured)
    noise = noise_floor(measured, comparison, roles)
    level = look_level(run.profile.looks)
    ladder = run.profile.load.ladder
    reads_cpu = any(one.cpu.height for one in measured.values())
    entries = {}
    for name, group in by_config.items():
        entries[name] = config_entry(group, measured.get(name), at_blocks)
        if one := measured.get(name):
            set_verdicts(
                entries[name], one, level, promised_metrics(one, ladder, reads_cpu)
            )
    forward_ms = run.profile.forward_us / 1e3
    compare_with_baseline(entries, comparison, roles.baseline, noise, forward_ms)
    compare_with_floor(entries, comparison, roles.floor)
    warnings: dict[str | None, list[RunWarning]] = {
        None: run_warnings(run, roles, noise)
    }
    for name, one in measured.items():
        warnings[name] = config_warnings(entries[name], one.steps)
        warnings[name] += undecided(entries[name])
        warnings[name] += growth_alone(entries[name], one.growth_slopes)
        entries[name].warnings = [str(warning) for warning in warnings[name]]
    document = PerConfig(
        provenance=run.provenance | {"report_git_commit": commit},
        profile=run.profile,
        window=_window_record(at_blocks, trials) if at_blocks else None,
        noise_floor=noise,
        warnings=[str(warning) for warning in warnings[None]],
        configs=entries,
        hosts=host_entries(run.hosts, trials, measured),
        machine=machine_entry(trials, run.hosts),
    )
    return Analysis(document, roles, warnings, measured)


def stated_cache_blocks(measured: Mapping[str, ConfigEstimates]) -> int | None:
    """Return |cache| at the stated level, the median over the configs that have it."""
    known = [one.level.cache_blocks for one in measured.values() if one.level]
    return round(float(np.median(known))) if known else None


def _window_record(at_blocks: int, trials: list[LoadedTrial]) -> WindowRecord:
    sizes = [t.facts.block_size for t in trials if t.facts]
    block_size = int(sizes[0]) if sizes else 16
    return WindowRecord(
        at_cache_blocks=at_blocks,
        requests_to_fill=requests_to_fill(at_blocks, trials, block_size),
    )


TIMES = ("schedule", "step")


def host_entries(
    hosts: Sequence[HostRecord] | None,
    trials: Sequence[LoadedTrial],
    measured: Mapping[str, ConfigEstimates],
) -> dict[str, HostEntry] | None:
    """Build an entry per host; None for a run on one machine."""
    if not hosts:
        return None
    found = {}
    for host in hosts:
        own = [trial for trial in trials if trial.repeat in host.repeats]
        found[host.host] = HostEntry(
            cpu_model=host.provenance.get("cpu_model"),
            repeats=sorted(host.repeats),
            servers=len(own),
            servers_that_count=sum(trial.steps is not None for trial in own),
            send_lag_p99_ms=(send_lag_ms(own) or {}).get("p99"),
            p50_us={
                name: levels
                for name, one in measured.items()
                if one.level and (levels := _levels(one.level, host.repeats))
            },
        )
    return found


def _levels(level: Level, repeats: list[int]) -> dict[str, float]:
    """p50 of TIMES in the steps of `repeats` alone."""
    own = Level(level.steps.filter(pl.col("repeat").is_in(repeats)))
    known = {time: own.quantiles(f"{time}_us") for time in TIMES}
    return {time: quantiles["p50"] for time, quantiles in known.items() if quantiles}
