# SPDX-License-Identifier: Apache-2.0
"""From a run's trials over its holds to the document per_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import (
    ConfigEvidence,
    Evidence,
    HeldLevels,
    HostEntry,
    Judged,
    NoiseFloor,
    PerConfig,
    WindowRecord,
)
from kvtax.records.profile import Ladder, ProfileRecord
from kvtax.records.run import HostRecord, RunRecord
from kvtax.records.warning import RunWarning
from kvtax.stats.processes import look_level
from kvtax.stats.quantiles import quantile
from kvtax.steps.trial_steps import NO_READINGS
from kvtax.verdict.facts import (
    growth_curve,
    growth_slope,
    measured,
    steps_of_configs,
)
from kvtax.verdict.holds import (
    as_table,
    held_steps,
    hold_table,
    rare_steps,
    tpot_of_holds,
)
from kvtax.verdict.latency import send_lag
from kvtax.verdict.machine import graded, machine_record, undisturbed
from kvtax.verdict.metrics import SCHEDULE, STEP, TIMED, TPOT
from kvtax.verdict.roles import Roles, roles_of
from kvtax.verdict.statements import Statements, decisive, noise_floor, reads_cpu
from kvtax.verdict.trials import LoadedTrial
from kvtax.verdict.verdict import overall_verdict
from kvtax.verdict.warnings import config_warnings, run_warnings

COMPARED = (SCHEDULE, STEP)


@dataclass(frozen=True)
class Analysis:
    """The document, and what the summary and the figures need beside it.

    `warnings` are the document's warnings by config, those of the run under None.
    `holds` are tables of kvtax.verdict.holds, by config.
    """

    document: PerConfig
    evidence: Evidence
    roles: Roles
    warnings: dict[str | None, list[RunWarning]]
    holds: dict[str, pl.DataFrame]


def analyse(run: RunRecord, trials: list[LoadedTrial], commit: str | None) -> Analysis:
    """Compute the whole per_config.json of a run."""
    return judge(evidence_of(run, trials, commit))


def evidence_of(
    run: RunRecord, trials: list[LoadedTrial], commit: str | None
) -> Evidence:
    """Reduce a run to the evidence of its verdicts: a row for each hold."""
    by_config: dict[str, list[LoadedTrial]] = {}
    for trial in trials:
        by_config.setdefault(trial.config, []).append(trial)
    steps = steps_of_configs(by_config)
    configs = {
        name: _of_config(group, steps.get(name), run.profile)
        for name, group in by_config.items()
    }
    at_blocks = _stated_blocks(configs, run.profile.load.ladder)
    return Evidence(
        run=run,
        report_git_commit=commit,
        window=WindowRecord(at_blocks) if at_blocks else None,
        machine=machine_record(trials),
        hosts=host_entries(run.hosts, trials, run.profile.load.ladder),
        configs=configs,
    )


def _of_config(
    trials: list[LoadedTrial], steps: pl.DataFrame | None, profile: ProfileRecord
) -> ConfigEvidence:
    ladder = profile.load.ladder
    facts = measured(trials, steps, ladder)
    if steps is None:
        return ConfigEvidence(facts=facts)
    good = [trial for trial in trials if trial.steps is not None]
    readings = [trial.readings for trial in good if trial.readings is not None]
    tpot_us = [
        tpot_of_holds(t.repeat, t.requests.requests, profile.forward_us)
        for t in good
        if t.requests
    ]
    holds = hold_table(
        steps,
        pl.concat([NO_READINGS, *readings], how="diagonal"),
        pl.concat(tpot_us),
        ladder,
    )
    return ConfigEvidence(
        facts=facts,
        holds=holds.to_dict(as_series=False),
        growth_slopes={SCHEDULE: growth_slope(steps)},
        curve=growth_curve(steps),
    )


def _stated_blocks(configs: Mapping[str, ConfigEvidence], ladder: Ladder) -> int | None:
    """Return |cache| at the stated level, the median over the configs that have it."""
    known = []
    for config in configs.values():
        levels, many = config.holds.get("level", []), config.holds.get("many", [])
        blocks = [
            at
            for at, level, big in zip(
                config.holds.get("cache_blocks", []), levels, many, strict=True
            )
            if level == ladder.stated_level and not big and at is not None
        ]
        known += [float(np.median(blocks))] if blocks else []
    return round(float(np.median(known))) if known else None


@dataclass(frozen=True)
class _JudgedRun:
    """Facts that all configs of a run share."""

    statements: Statements
    roles: Roles
    noise: NoiseFloor
    refused: bool

    def baselines_of(self, name: str) -> list[str]:
        """Return the configs that `name` is compared with: equal ones, or none."""
        baseline, twin = self.roles.baseline, self.roles.twin
        if baseline is None or name == baseline or self.noise.differs:
            return []
        return [base for base in (baseline, twin) if base not in (None, name)]

    def over_floor(self, name: str, column: str) -> Estimate | None:
        """Return the ratio of a column to the floor's; None without, or for it."""
        floor = self.roles.floor
        if floor is None or floor == name or self.noise.differs:
            return None
        return self.statements.ratio(name, floor, column)


def judge(evidence: Evidence) -> Analysis:
    """Compute per_config.json from the evidence."""
    run, profile = evidence.run, evidence.run.profile
    roles = roles_of(run, evidence.configs)
    tables = {
        name: as_table(config.holds, profile.forward_us)
        for name, config in evidence.configs.items()
        if config.holds
    }
    machine = graded(evidence.machine, tables, roles.baseline)
    holds = undisturbed(tables, machine)
    ladder, level = profile.load.ladder, look_level(profile.looks)
    statements = Statements.of(holds, ladder, level)
    noise = noise_floor(statements, roles)
    refused = machine is not None and machine.refused
    common = _JudgedRun(statements, roles, noise, refused)
    warnings: dict[str | None, list[RunWarning]] = {
        None: run_warnings(run, roles, noise, machine)
    }
    configs = {}
    for name, config in evidence.configs.items():
        judged = _judged(name, config, common, ladder)
        if judged.verdict != "failed":
            warnings[name] = config_warnings(judged)
            judged.warnings = [str(warning) for warning in warnings[name]]
        configs[name] = judged
    document = PerConfig(
        provenance=run.provenance | {"report_git_commit": evidence.report_git_commit},
        profile=profile,
        baseline=roles.baseline,
        floor=roles.floor,
        window=evidence.window,
        noise_floor=noise,
        warnings=[str(warning) for warning in warnings[None]],
        configs=configs,
        hosts=evidence.hosts,
        machine=machine,
    )
    return Analysis(document, evidence, roles, warnings, holds)


def _judged(
    name: str, evidence: ConfigEvidence, run: _JudgedRun, ladder: Ladder
) -> Judged:
    """State and judge one config."""
    facts = {
        field: getattr(evidence.facts, field)
        for field in evidence.facts.__struct_fields__
    }
    growth = evidence.growth_slopes.get(SCHEDULE)
    facts["growth_slope_us_per_1k_blocks"] = growth and Estimate(growth.value)
    statements = run.statements
    if name not in statements.holds:
        return Judged(**facts, verdict="inconclusive" if evidence.holds else "failed")
    table = statements.holds[name]
    judged = statements.judgements(name, evidence.facts)
    needed = decisive(table, ladder, reads_cpu(statements.holds))
    held = statements.held(name, judged)
    baselines = run.baselines_of(name)
    return Judged(
        **facts,
        verdict="inconclusive" if run.refused else overall_verdict(judged, needed),
        verdict_of={metric: of.verdict for metric, of in judged.items()},
        not_measured=sorted(needed - judged.keys()),
        held=held,
        rare=rare_steps(table),
        full_adds=statements.full_adds(name),
        tpot_full_adds=statements.tpot_full_adds(name),
        over_baseline=statements.over(name, baselines, TIMED),
        tpot_over_baseline=statements.over(name, baselines, TPOT),
        vs_noop={
            column: ratio
            for column in COMPARED
            if (ratio := run.over_floor(name, column)) is not None
        },
        slope_us_per_1k_blocks=_schedule_slope(statements, name, held),
    )


def _schedule_slope(
    statements: Statements, name: str, held: Mapping[str, HeldLevels]
) -> dict[str, Estimate]:
    """Return the slope of schedule() in us per 1,000 blocks; without an interval."""
    if (fitted := statements.fits[name].get(SCHEDULE)) is None:
        return {}
    slope, _ = fitted.slope()
    return {SCHEDULE: Estimate(round(slope * 100 * (held[SCHEDULE].unit or 0.0), 3))}


def host_entries(
    hosts: Sequence[HostRecord] | None, trials: Sequence[LoadedTrial], ladder: Ladder
) -> dict[str, HostEntry] | None:
    """Build an entry per host; None for a run on one machine."""
    if not hosts:
        return None
    entries = {}
    for host in hosts:
        own = [trial for trial in trials if trial.repeat in host.repeats]
        lag = send_lag(own)
        entries[host.host] = HostEntry(
            cpu_model=host.provenance.get("cpu_model"),
            repeats=sorted(host.repeats),
            servers=len(own),
            servers_that_count=sum(trial.steps is not None for trial in own),
            send_lag_p99_ms=lag.p99 if lag else None,
            p50_us={
                name: levels
                for name in dict.fromkeys(trial.config for trial in own)
                if (levels := _levels(name, own, ladder))
            },
        )
    return entries


def _levels(
    name: str, trials: Sequence[LoadedTrial], ladder: Ladder
) -> dict[str, float]:
    """Return p50 of COMPARED at the stated level in the servers of one config."""
    own = steps_of_configs({name: [t for t in trials if t.config == name]})
    if name not in own:
        return {}
    at = held_steps(own[name], ladder).filter(
        "whole",
        "decode_only",
        ~pl.col("many"),
        pl.col("level") == ladder.stated_level,
    )
    known = {time: quantile(at[f"{time}_us"], 0.5) for time in COMPARED}
    return {time: round(us, 3) for time, us in known.items() if us is not None}
