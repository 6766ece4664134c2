# SPDX-License-Identifier: Apache-2.0
"""A run's trials to the document per_config.json (lab/records/per_config.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.records.per_config import PerConfig, WindowRecord
from lab.records.run import RunRecord
from lab.records.warning import RunWarning
from microbench.analysis.against import (
    compare_with_baseline,
    compare_with_floor,
    noise_floor,
)
from microbench.analysis.entry import config_entry
from microbench.analysis.hosts import host_entries
from microbench.analysis.latency import requests_to_fill
from microbench.analysis.levels import Level, Window, choose_window
from microbench.analysis.measured import Measured, level_all, measure_all
from microbench.analysis.roles import Roles, roles_of
from microbench.analysis.speed import too_slow
from microbench.analysis.trials import LoadedTrial
from microbench.analysis.undecided import undecided
from microbench.analysis.warn import config_warnings, run_warnings


@dataclass(frozen=True)
class Analysis:
    """The document, and what the summary and the figures need beside it.

    `doubts` are the document's warnings by config, those of the run under None.
    """

    document: PerConfig
    roles: Roles
    doubts: dict[str | None, list[RunWarning]]
    measured: dict[str, Measured]


def analyse(run: RunRecord, trials: list[LoadedTrial], commit: str | None) -> Analysis:
    """Everything per_config.json states about a run."""
    by_config: dict[str, list[LoadedTrial]] = {}
    counted = at_usual_speed(trials)
    for trial in counted:
        by_config.setdefault(trial.config, []).append(trial)
    roles = roles_of(run, by_config)
    alike = (roles.baseline, roles.twin)
    measured = measure_all(by_config, run.profile, alike)
    window, warnings = place_levels(measured)
    level_all(measured, run.profile, alike)
    noise = noise_floor(measured, roles)
    entries = {
        name: config_entry(group, measured.get(name), window, noise)
        for name, group in by_config.items()
    }
    forward_ms = float(run.profile.get("forward_us") or 0.0) / 1e3
    compare_with_baseline(entries, measured, roles.baseline, noise, forward_ms)
    compare_with_floor(entries, measured, roles.floor)
    doubts: dict[str | None, list[RunWarning]] = {
        None: warnings + run_warnings(run, roles, noise)
    }
    for name, one in measured.items():
        doubts[name] = config_warnings(entries[name], one.steps)
        doubts[name] += undecided(entries[name], by_config[name], noise)
        entries[name].warnings = [str(doubt) for doubt in doubts[name]]
    document = PerConfig(
        provenance=run.provenance | {"report_git_commit": commit},
        profile=run.profile,
        window=window and _window_record(window, trials),
        noise_floor=noise,
        slowness_share=next((one.slowness_share for one in measured.values()), {}),
        warnings=[str(doubt) for doubt in doubts[None]],
        configs=entries,
        hosts=host_entries(run.hosts, counted, measured),
    )
    return Analysis(document, roles, doubts, measured)


def at_usual_speed(trials: list[LoadedTrial]) -> list[LoadedTrial]:
    """The trials, those that were made on a much slower machine without their steps."""
    slow = too_slow([trial.control for trial in trials])
    return [
        trial if times is None else replace(trial, steps=None, error=_slow(times))
        for trial, times in zip(trials, slow, strict=True)
    ]


def _slow(times: float) -> str:
    return f"set aside: the machine was {times:.1f} times as slow as usual"


def place_levels(
    measured: dict[str, Measured],
) -> tuple[Window | None, list[RunWarning]]:
    """Give each config its level in the window that suits all; and what to warn of."""
    window, warnings = choose_window({n: m.steps for n, m in measured.items()})
    for one in measured.values():
        if window is not None:
            level = Level(window.select(one.steps), window.mix)
            one.level = level if level.steps.height else None
    return window, warnings


def _window_record(window: Window, trials: list[LoadedTrial]) -> WindowRecord:
    sizes = [t.facts.block_size for t in trials if t.facts]
    block_size = int(sizes[0]) if sizes else 16
    return WindowRecord(
        at_cache_blocks=window.at_cache_blocks,
        batch_mix={str(batch): round(share, 4) for batch, share in window.mix.items()},
        requests_to_fill=requests_to_fill(window.at_cache_blocks, trials, block_size),
    )
