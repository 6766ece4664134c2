# SPDX-License-Identifier: Apache-2.0
"""SUMMARY.md, the first page on a run; report.html has the rest.

Every number in it is from the document per_config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from kvtax.look.discover import common_clock, discover
from kvtax.look.instances import read_instance
from kvtax.look.page import time_line
from kvtax.records import stacks
from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.records.run import ReferenceFigures
from kvtax.report import render
from kvtax.report.document import Cell, Flame, Page, Section, Table, TimeLine
from kvtax.report.markdown import DASH, TIMES, interval, number, spread, table
from kvtax.report.render import terminal, warning_list
from kvtax.verdict.analysis import Analysis
from kvtax.verdict.measured import ConfigSteps
from kvtax.verdict.metrics import TIMED, TIMED_MANY
from kvtax.verdict.roles import Roles
from kvtax.verdict.trials import LoadedTrial
from microbench.summary.figures import (
    CURVES,
    HELD_LEVELS,
    HELD_PASSES,
    curve_figure,
    held_figure,
)
from microbench.summary.growth import (
    STATED,
    addition,
    answer,
    expected_verdicts,
    hypothesis,
    level_table,
    reason,
    short_verdict,
    verdict_words,
    verdicts,
)
from microbench.summary.tables import (
    accounts,
    attribution,
    before_and_after,
    hosts,
    model_note,
    noise_floor,
    parts_table,
    provenance,
    reconciliation,
    warnings_of,
)


def write_summary(analysis: Analysis, figures: Collection[str]) -> str:
    """Render SUMMARY.md; `figures` are the names of the drawn figures."""
    document = analysis.document
    known = expected_verdicts(document, analysis.roles)
    sections = [
        "# What a KV connector costs per engine step",
        machine(document),
        f"{QUESTION} {answer(document)}",
        _shown(table_of(document, analysis.roles)),
        study_walk(document, analysis.roles),
        model_note(document),
        "## Verdicts",
        _verdicts(document.configs),
        known and known.note,
        _shown(level_table(document)),
        _figures(figures),
        _hosts(hosts(document, analysis.roles)),
        "## Warnings",
        _warnings(analysis),
        "## More",
        _more(document),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def machine(document: PerConfig) -> str:
    """Render the grade of the machine with what it rests on."""
    found = document.machine
    if found is None:
        return "Machine: not graded, as the run did not record it."
    us = number(found.yardstick_us, 0)
    facts = f"{found.cores} cores; the yardstick, fixed work, took {us} µs"
    return f"Machine: {'; '.join([f'**{found.grade}**', *found.reasons, facts])}."


def verdict_lines(document: PerConfig) -> str:
    """Render each config's verdict, cost and slope for a terminal."""
    rows: list[list[Cell]] = []
    for name, entry in document.configs.items():
        connector = entry.connector
        slope = entry.slope_us_per_1k_blocks.get("schedule")
        us = number(connector.us_per_step if connector else None)
        rows.append([name, short_verdict(entry), us, interval(slope)])
    head = [
        "config",
        "verdict",
        "connector, µs per step",
        "schedule, µs per 1,000 blocks",
    ]
    verdicts = Table(title="", columns=head, rows=rows)
    return terminal(
        Page(
            title="Verdicts",
            question="",
            answer=[],
            warnings=[],
            sections=[verdicts],
            made="",
        )
    )


def _verdicts(configs: dict[str, ConfigEntry]) -> str:
    """Tabulate what a full cache adds; name the configs of which nothing is known."""
    head = ["a full cache adds, µs", *STATED.values(), "remarks"]
    rows = [
        [f"`{name}`", *(addition(entry, metric) for metric in STATED), reason(entry)]
        for name, entry in configs.items()
        if entry.held and entry.verdict != "failed"
    ]
    others = [
        f"- `{name}`: **{short_verdict(entry)}**: {verdict_words(entry)}"
        for name, entry in configs.items()
        if not entry.held or entry.verdict == "failed"
    ]
    return "\n\n".join(filter(None, [table(head, rows), "\n".join(others)]))


def _shown(found: Table) -> str:
    rows = [[f"`{row[0]}`", *map(str, row[1:])] for row in found.rows]
    return f"{table(found.columns, rows)}\n\n{found.note}"


def _warnings(analysis: Analysis) -> str:
    warnings = warnings_of(analysis.warnings, analysis.document.configs)
    return "\n".join(warning_list(warnings)) or "None."


def _hosts(found: Table | None) -> str:
    if found is None:
        return ""
    rows = [[str(cell) for cell in row] for row in found.rows]
    return f"## Hosts\n\n{table(found.columns, rows)}\n\n{found.note}"


# Figures of the page: what they show.
SHOWN = {
    HELD_LEVELS: "Scheduler and connector calls at held levels of |cache|",
    HELD_PASSES: "The same, pass by pass",
    "schedule_vs_cache": "schedule() while |cache| grows",
}


def _figures(figures: Collection[str]) -> str:
    return "\n".join(
        f"![{words}](figures/{name}.png) [data](figures/{name}.csv)"
        for name, words in SHOWN.items()
        if name in figures
    )


def _more(document: PerConfig) -> str:
    facts = document.provenance
    return (
        "`report.html`, written beside this file, opens in a browser: the evidence for "
        "each verdict, the time of each method, the fixes, noise, requests and "
        "provenance. [per_config.json](per_config.json) is for programs.\n\n"
        f"Run: `{facts.get('command_line')}`, {facts.get('date_utc')}, vLLM "
        f"{facts.get('vllm_version')}, {facts.get('cpu_count')} {TIMES} "
        f"{facts.get('cpu_model')}, commit {facts.get('git_commit')}."
    )


# The study's replay: APC 79 %, so about so many blocks, on a forward of so long.
REPLAY_BLOCKS, FORWARD_MS = 13_000, 7.0


def table_of(document: PerConfig, roles: Roles) -> Table:
    """Tabulate each config, and the study's figures for the same thing below it."""
    ladder = document.profile.load.ladder
    few, many = ladder.decoders, ladder.many_decoders
    rows = []
    with_tpot = any(entry.held_tpot for entry in document.configs.values())
    for name, entry in document.configs.items():
        tpot = [_held_tpot(entry)] * with_tpot
        rows.append([name, short_verdict(entry), *_ours(entry, many > 0), *tpot])
        if (told := roles.of[name].reference) is not None:
            theirs = [*_theirs(told, many > 0), *[DASH] * with_tpot]
            rows.append(["its reference (H20)", DASH, *theirs])
    at = document.window.at_cache_blocks if document.window else 0
    note = (
        "Rows of this run, and below some of them the reference study's (H5; H20 96 "
        f"GB, levels at 16,600 blocks; here {at:,}). Another machine and another load: "
        "compare ratios and signs, not µs. The study's `step_dur` is our `schedule`. "
        "Its `mooncake_both` is our `mooncake_both_hash_sync`, a fork that walks all "
        "cached hashes in each step; Mooncake in vLLM 0.18.1 does not. get_finished "
        "is that of a decode-only step without transfers."
    )
    if with_tpot:
        note += f" TPOT held is that of {few} requests at {at:,} blocks."
    head = ["config", "verdict", f"a full cache adds, µs per step of {few} requests"]
    head += [f"of {many}"] if many else []
    head += ["in growth, µs per 1,000 blocks", "schedule µs p50"]
    head += ["build_meta µs p50 (share)", "get_finished µs p50/p90/p99", "TPOT ms p50"]
    head += [f"TPOT held, ms (over {roles.baseline})"] * with_tpot
    return Table(title="H5: cost per step", note=note, columns=head, rows=rows)


def _ours(entry: ConfigEntry, many: bool) -> list[str]:
    level = entry.schedule_us or {}
    adds = [entry.held.get(name) for name in (TIMED, *[TIMED_MANY] * many)]
    return [
        *(interval(held.full_adds_us if held else None) for held in adds),
        interval(entry.growth_slope_us_per_1k_blocks),
        number(level.get("p50")),
        _share((entry.build_meta_us or {}).get("p50"), level.get("p50")),
        spread(entry.get_finished_us),
        number((entry.tpot_ms or {}).get("p50"), 3),
    ]


def _held_tpot(entry: ConfigEntry) -> str:
    if (tpot := entry.held_tpot) is None:
        return DASH
    over = f" ({interval(tpot.over_baseline_ms, 2)})" if tpot.over_baseline_ms else ""
    return f"{tpot.p50_ms:.2f}{over}"


def _theirs(told: ReferenceFigures, many: bool) -> list[str]:
    finished = told.get_finished_us
    return [
        *[DASH] * (1 + many),
        f"{told.schedule_slope_us_per_1k_blocks:+.1f}",
        number(told.schedule_p50_us, 0),
        _share(told.build_meta_p50_us, told.schedule_p50_us),
        "/".join(number(us, 0) for us in finished) if finished else DASH,
        DASH,
    ]


def _share(part: float | None, whole: float | None) -> str:
    if part is None or not whole:
        return DASH
    return f"{number(part)} ({part / whole:.0%})"


def study_walk(document: PerConfig, roles: Roles) -> str:
    """State what the walk adds to a step of the study's replay, by both machines."""
    told = []
    for name in roles.named("hypothesis"):
        entry, theirs = document.configs[name], roles.of[name].reference
        held = entry.held.get("schedule")
        finished = (entry.get_finished_us or {}).get("p50")
        if theirs and theirs.get_finished_us and held and finished is not None:
            empty, at = held.us[0], np.interp(REPLAY_BLOCKS, held.cache_blocks, held.us)
            ours_ms = (float(at) - empty + finished) / 1e3
            slope = theirs.schedule_slope_us_per_1k_blocks
            build_us = slope * REPLAY_BLOCKS / 1e3
            ref_ms = (build_us + theirs.get_finished_us[0]) / 1e3
            told.append(
                f"At the study's APC of 79 % (about {REPLAY_BLOCKS:,} blocks) the walk "
                f"and get_finished of {name} add {ours_ms:.2f} ms per step here, and "
                f"by the study's figures {ref_ms:.2f} ms: {ours_ms / FORWARD_MS:.0%} "
                f"and {ref_ms / FORWARD_MS:.0%} of a decode forward of {FORWARD_MS:g} "
                "ms."
            )
    return " ".join(told)


QUESTION = (
    "What does a KV connector cost per engine step, and does that grow with |cache|, "
    "the number of cached block hashes?"
)


def write_page(
    analysis: Analysis, steps: Mapping[str, ConfigSteps], servers: list[Section]
) -> str:
    """Render the page; `servers` are the sections on single servers."""
    document, roles = analysis.document, analysis.roles
    figures = {name: curve_figure(steps, analysis, name) for name in CURVES}
    sections = [
        table_of(document, roles),
        held_figure(analysis),
        verdicts(document),
        expected_verdicts(document, roles),
        *before_and_after(document, roles),
        *(hypothesis(document, roles, name) for name in roles.named("hypothesis")),
        *figures.values(),
        level_table(document),
        parts_table(document),
        attribution(document),
        reconciliation(document, roles.baseline),
        noise_floor(document),
        hosts(document, roles),
        accounts(document),
        *servers,
        provenance(document),
    ]
    return render.html(
        Page(
            title="What a KV connector costs per engine step",
            question=QUESTION,
            answer=[answer(document), machine(document)],
            warnings=warnings_of(analysis.warnings, document.configs),
            sections=[section for section in sections if section is not None],
            made="Another repeat's moments, or a trace of them: kvtax look "
            "RUN_DIR/CONFIG/r1. Every figure: per_config.json.",
        )
    )


# Few enough that a page of twelve configs stays well below 3 MB.
INTERVALS = 300
REQUESTS = 200


def moments(run_dir: Path, trials: list[LoadedTrial]) -> list[TimeLine]:
    """Build a folded time line per measured config, of its first good repeat.

    Raises RecordsError for files that `load_run` would not have read either.
    """
    first: dict[str, int] = {}
    for trial in trials:
        if trial.error is None and trial.engine_steps:
            first.setdefault(trial.config, trial.repeat)
    return [
        _moments(f"{config} r{repeat}", run_dir / config / f"r{repeat}")
        for config, repeat in first.items()
    ]


def code(run_dir: Path, trials: list[LoadedTrial]) -> list[Flame]:
    """Build a folded flame graph per process of each sampled config.

    Raises RecordsError if its records cannot be read.
    """
    shown = []
    for config in dict.fromkeys(trial.config for trial in trials):
        folder = run_dir / config / stacks.FOLDER
        if any(folder.rglob("stacks.*.json")):
            (found, *_), _ = discover(folder)
            for flame in read_instance(found).flames:
                flame.title, flame.open = f"{config}: {flame.title}", False
                shown.append(flame)
    return shown


def _moments(name: str, folder: Path) -> TimeLine:
    (found, *_), _ = discover(folder)
    line = time_line(
        found.name, read_instance(found), common_clock([found]), INTERVALS, REQUESTS
    )
    line.title, line.open = f"Every moment of {name}", False
    return line
