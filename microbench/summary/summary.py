# SPDX-License-Identifier: Apache-2.0
"""SUMMARY.md: what a person reads first. The rest is in report.html.

Every number in it is from the document per_config.json.
"""

from __future__ import annotations

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.markdown import DASH, TIMES, number, spread, table
from microbench.analysis.analysis import Analysis
from microbench.summary.context import model_note, warnings
from microbench.summary.expected import expected_verdicts
from microbench.summary.growth import verdict_words
from microbench.summary.hosts import hosts
from microbench.summary.page import QUESTION
from page.document import Table

FIGURE = "schedule_vs_cache"


def write_summary(analysis: Analysis, figures: list[str]) -> str:
    """The whole text; `figures` are the names in figures/ that were drawn."""
    document = analysis.document
    known = expected_verdicts(document, analysis.roles)
    sections = [
        "# What a KV connector costs per engine step",
        f"{QUESTION} {model_note(document)}",
        _verdicts(document.configs),
        known and known.note,
        _table(document),
        _figure(figures),
        _hosts(hosts(document, analysis.roles)),
        "## Warnings",
        warnings(analysis.doubts, document.configs),
        "## More",
        _more(document),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _verdicts(configs: dict[str, ConfigEntry]) -> str:
    return "\n".join(
        f"- `{name}`: **{entry.verdict}**: {verdict_words(entry)}"
        for name, entry in configs.items()
    )


def _table(document: PerConfig) -> str:
    rows = []
    for name, entry in document.configs.items():
        calls = (entry.connector or {}).get("us_per_step", {}).get("mean")
        rows.append(
            [
                f"`{name}`",
                DASH if calls is None else number(calls),
                spread(entry.schedule_us, names=("p50", "p90")),
                spread(entry.step_us, names=("p50", "p90")),
                spread(entry.tpot_ms, 3, ("p50", "p90")),
                entry.verdict,
            ]
        )
    head = ["config", "connector's calls, µs per step", "schedule µs p50/p90"]
    head += ["step µs p50/p90", "TPOT ms p50/p90", "verdict"]
    window = document.window
    note = "No level could be stated: see the warnings."
    if window:
        note = (
            f"`schedule()` and step at {window.at_cache_blocks:,} cached blocks, every "
            "config at the same mix of batch sizes; the connector's calls over all "
            "steps of growth."
        )
    return f"{table(head, rows)}\n\n{note}"


def _hosts(found: Table | None) -> str:
    if found is None:
        return ""
    return f"## Hosts\n\n{table(found.columns, found.rows)}\n\n{found.note}"


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
        "[report.html](report.html) opens in a browser, from disk: how each verdict "
        "was reached, what each method takes, before and after the fixes, noise, "
        "requests, and how this was made. [per_config.json](per_config.json) is for "
        "programs.\n\n"
        f"Run: `{facts.get('command_line')}`, {facts.get('date_utc')}, vLLM "
        f"{facts.get('vllm_version')}, {facts.get('cpu_count')} {TIMES} "
        f"{facts.get('cpu_model')}, commit {facts.get('git_commit')}."
    )
