# SPDX-License-Identifier: Apache-2.0
"""SUMMARY.md, the first page on a run; report.html has the rest.

Every number in it is from the document per_config.json.
"""

from __future__ import annotations

from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.report.document import Cell, Page, Table
from kvtax.report.markdown import TIMES, interval, number, table
from kvtax.report.render import terminal, warning_list
from kvtax.verdict.analysis import Analysis
from microbench.summary import study
from microbench.summary.context import hosts, model_note, warnings_of
from microbench.summary.growth import (
    answer,
    expected_verdicts,
    level_table,
    verdict_words,
)
from microbench.summary.page import QUESTION

FIGURE = "schedule_vs_cache"


def write_summary(analysis: Analysis, figures: list[str]) -> str:
    """Render SUMMARY.md; `figures` are the names of the drawn figures."""
    document = analysis.document
    known = expected_verdicts(document, analysis.roles)
    sections = [
        "# What a KV connector costs per engine step",
        f"{QUESTION} {answer(document)}",
        _shown(study.table_of(document, analysis.roles)),
        study.reconciliation(document, analysis.roles),
        model_note(document),
        "## Verdicts",
        _verdicts(document.configs),
        known and known.note,
        _shown(level_table(document)),
        _figure(figures),
        _hosts(hosts(document, analysis.roles)),
        "## Warnings",
        _warnings(analysis),
        "## More",
        _more(document),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def verdict_lines(document: PerConfig) -> str:
    """Render each config's verdict, cost and slope for a terminal."""
    rows: list[list[Cell]] = []
    for name, entry in document.configs.items():
        connector = entry.connector
        slope = entry.slope_us_per_1k_blocks.get("schedule")
        us = number(connector.us_per_step if connector else None)
        rows.append([name, entry.verdict, us, interval(slope)])
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
    """List the configs by verdict; those that say the same share a line."""
    said: dict[str, list[str]] = {}
    for name, entry in configs.items():
        words = f"**{entry.verdict}**: {verdict_words(entry)}"
        said.setdefault(words, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {words}" for words, names in said.items())


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


def _figure(figures: list[str]) -> str:
    if FIGURE not in figures:
        return ""
    return (
        f"![schedule() against |cache|](figures/{FIGURE}.png)\n\n"
        f"Data: [figures/{FIGURE}.csv](figures/{FIGURE}.csv)"
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
