# SPDX-License-Identifier: Apache-2.0
"""From a run's trials over its holds to the document per_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import polars as pl

from kvtax.records.per_config import (
    ConfigEvidence,
    Evidence,
    HostEntry,
    PerConfig,
    WindowRecord,
)
from kvtax.records.profile import Ladder
from kvtax.records.run import HostRecord, RunRecord
from kvtax.records.warning import RunWarning
from kvtax.stats.processes import look_level
from kvtax.verdict.entry import (
    compare_with_baseline,
    compare_with_floor,
    config_entry,
    noise_floor,
    set_held_tpot,
    set_verdicts,
)
from kvtax.verdict.holds import as_table, hold_table
from kvtax.verdict.latency import log_tpot, requests_to_fill, send_lag_ms
from kvtax.verdict.machine import machine_entry
from kvtax.verdict.measured import (
    MAX_STEPS,
    Comparison,
    ConfigEstimates,
    ConfigSteps,
    Level,
    estimate_all,
    promised_metrics,
    steps_of_all,
    thin,
)
from kvtax.verdict.metrics import PROCESSES, TPOT
from kvtax.verdict.roles import Roles, roles_of
from kvtax.verdict.trials import LoadedTrial
from kvtax.verdict.warnings import config_warnings, interrupted_share, run_warnings


@dataclass(frozen=True)
class Analysis:
    """The document, and what the summary and the figures need beside it.

    `warnings` are the document's warnings by config, those of the run under None.
    `holds` are tables of kvtax.verdict.holds, by config.
    """

    document: PerConfig
    roles: Roles
    warnings: dict[str | None, list[RunWarning]]
    estimates: dict[str, ConfigEstimates]
    holds: dict[str, pl.DataFrame]


def analyse(run: RunRecord, trials: list[LoadedTrial], commit: str | None) -> Analysis:
    """Compute the whole per_config.json of a run."""
    steps = steps_of_run(run, trials)
    return judge(evidence_of(run, trials, steps, commit))


def steps_of_run(run: RunRecord, trials: list[LoadedTrial]) -> dict[str, ConfigSteps]:
    """Put the steps of every config together that has any, by name."""
    return steps_of_all(_by_config(trials), run.profile.load.ladder)


def _by_config(trials: list[LoadedTrial]) -> dict[str, list[LoadedTrial]]:
    by_config: dict[str, list[LoadedTrial]] = {}
    for trial in trials:
        by_config.setdefault(trial.config, []).append(trial)
    return by_config


def evidence_of(
    run: RunRecord,
    trials: list[LoadedTrial],
    steps: Mapping[str, ConfigSteps],
    commit: str | None,
) -> Evidence:
    """Reduce a run to what its verdicts rest on: a row for each hold."""
    at_blocks = stated_cache_blocks(steps)
    return Evidence(
        run=run,
        report_git_commit=commit,
        window=_window_record(at_blocks, trials) if at_blocks else None,
        machine=machine_entry(trials, run.hosts),
        hosts=host_entries(run.hosts, trials, steps),
        configs={
            name: _of_config(group, steps.get(name), at_blocks, run.profile.load.ladder)
            for name, group in _by_config(trials).items()
        },
    )


def _of_config(
    trials: list[LoadedTrial],
    steps: ConfigSteps | None,
    at_blocks: int | None,
    ladder: Ladder,
) -> ConfigEvidence:
    facts = config_entry(trials, steps, at_blocks)
    if steps is None:
        return ConfigEvidence(facts=facts)
    return ConfigEvidence(
        facts=facts,
        holds=hold_table(steps.held, steps.cpu).to_dict(as_series=False),
        log_p50=steps.log_p50() | {TPOT: log_tpot(trials, ladder)},
        growth_slopes=steps.growth_slopes(),
        interrupted_share=interrupted_share(thin(steps.decodes, MAX_STEPS)),
    )


def judge(evidence: Evidence) -> Analysis:
    """Compute per_config.json from what was measured."""
    run, of = evidence.run, evidence.configs
    roles = roles_of(run, of)
    holds = {name: as_table(one.holds) for name, one in of.items() if one.holds}
    estimates = estimate_all(holds, run.profile.looks)
    comparison = Comparison({name: of[name].log_p50 for name in holds})
    noise = noise_floor(estimates, comparison, roles)
    reads_cpu = any(table[PROCESSES].count() for table in holds.values())
    entries, level = {}, look_level(run.profile.looks)
    for name, one in of.items():
        entries[name] = msgspec.structs.replace(one.facts)
        if found := estimates.get(name):
            with_calls, ladder = (
                one.facts.connector is not None,
                run.profile.load.ladder,
            )
            promised = promised_metrics(with_calls, ladder, reads_cpu)
            set_verdicts(entries[name], one, found, level, promised)
    forward_ms = run.profile.forward_us / 1e3
    compare_with_baseline(entries, comparison, roles.baseline, noise, forward_ms)
    compare_with_floor(entries, comparison, roles.floor)
    set_held_tpot(entries, comparison, roles.baseline)
    warnings: dict[str | None, list[RunWarning]] = {
        None: run_warnings(run, roles, noise)
    }
    for name in estimates:
        warnings[name] = config_warnings(entries[name], of[name])
        entries[name].warnings = [str(warning) for warning in warnings[name]]
    document = PerConfig(
        provenance=run.provenance | {"report_git_commit": evidence.report_git_commit},
        profile=run.profile,
        window=evidence.window,
        noise_floor=noise,
        warnings=[str(warning) for warning in warnings[None]],
        configs=entries,
        hosts=evidence.hosts,
        machine=evidence.machine,
    )
    return Analysis(document, roles, warnings, estimates, holds)


def stated_cache_blocks(steps: Mapping[str, ConfigSteps]) -> int | None:
    """Return |cache| at the stated level, the median over the configs that have it."""
    known = [one.level.cache_blocks for one in steps.values() if one.level]
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
    steps: Mapping[str, ConfigSteps],
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
                for name, one in steps.items()
                if one.level and (levels := _levels(one.level, host.repeats))
            },
        )
    return found


def _levels(level: Level, repeats: list[int]) -> dict[str, float]:
    """p50 of TIMES in the steps of `repeats` alone."""
    own = Level(level.steps.filter(pl.col("repeat").is_in(repeats)))
    known = {time: own.quantiles(f"{time}_us") for time in TIMES}
    return {time: quantiles["p50"] for time, quantiles in known.items() if quantiles}
