# SPDX-License-Identifier: Apache-2.0
"""SUMMARY.md, the first page on a run, and report.html with the rest.

Every number is from the document per_config.json; curves are from the evidence.
"""

from __future__ import annotations

from collections.abc import Collection

from kvtax.records.per_config import PerConfig
from kvtax.report import render
from kvtax.report.document import Page, Table, Words
from kvtax.report.markdown import TIMES, table
from kvtax.report.render import terminal, warning_list
from kvtax.verdict.analysis import Analysis
from microbench.summary import tables
from microbench.summary.figures import SHOWN, growth_figure, held_figure
from microbench.summary.words import (
    QUESTION,
    answer,
    expected,
    machine,
    model_note,
    not_measured,
    paired,
    remarks,
    unit,
)

TITLE = "What a KV connector costs per engine step"


def write_summary(analysis: Analysis, figures: Collection[str]) -> str:
    """Render SUMMARY.md; `figures` are the names of the drawn figures."""
    document, roles = analysis.document, analysis.roles
    warnings = tables.warnings_of(analysis.warnings, document.configs)
    reference = tables.reference(document, roles)
    hosts = tables.hosts(document, roles)
    sections = [
        f"# {TITLE}",
        "\n".join(warning_list(warnings)),
        QUESTION,
        *answer(document),
        expected(document, roles)[1],
        _shown(tables.costs(document)),
        "\n".join(f"- {remark}." for remark in remarks(document)),
        f"{unit(document)} {not_measured(document)}",
        f"{machine(document)} {model_note(document)}",
        paired(analysis.evidence.run),
        f"## {reference.title}\n\n{_shown(reference)}" if reference else "",
        f"## {hosts.title}\n\n{_shown(hosts)}" if hosts else "",
        "\n".join(
            f"![{words}](figures/{name}.png) [data](figures/{name}.csv)"
            for name, words in SHOWN.items()
            if name in figures
        ),
        _more(document),
    ]
    return "\n\n".join(section for section in sections if section.strip()) + "\n"


def verdict_lines(document: PerConfig) -> str:
    """Render the table of costs for a terminal."""
    page = Page(
        title="Verdicts",
        question="",
        answer=answer(document),
        warnings=[],
        sections=[tables.costs(document)],
        made="",
    )
    return terminal(page)


def _shown(shown: Table) -> str:
    rows = [[f"`{row[0]}`", *map(str, row[1:])] for row in shown.rows]
    return f"{table(shown.columns, rows)}\n\n{shown.note}".strip()


def _more(document: PerConfig) -> str:
    facts = document.provenance
    return (
        "`report.html`, written beside this file, has the holds of each verdict, "
        "methods, threads, requests and provenance; [per_config.json](per_config.json) "
        "is for programs; docs/method.md says how a figure is made. Run: "
        f"`{facts.get('command_line')}`, {facts.get('date_utc')}, "
        f"{facts.get('cpu_count')} {TIMES} {facts.get('cpu_model')}, commit "
        f"{facts.get('git_commit')}."
    )


def write_page(analysis: Analysis) -> str:
    """Render report.html."""
    document, roles = analysis.document, analysis.roles
    beside = [f"- {remark}." for remark in remarks(document)]
    sections = [
        held_figure(analysis),
        tables.costs(document),
        Words(title="Beside the table", paragraphs=beside) if beside else None,
        tables.verdicts(document),
        tables.known_verdicts(document, roles),
        tables.reference(document, roles),
        tables.own_limits(document, roles),
        growth_figure(analysis),
        tables.parts(document),
        tables.attribution(document),
        tables.hosts(document, roles),
        tables.requests(document),
        tables.provenance(document, model_note(document)),
    ]
    return render.html(
        Page(
            title=TITLE,
            question=QUESTION,
            answer=[
                *answer(document),
                f"{unit(document)} {not_measured(document)}",
                machine(document),
            ],
            warnings=tables.warnings_of(analysis.warnings, document.configs),
            sections=[section for section in sections if section is not None],
            made="A server's moments: kvtax look RUN_DIR/CONFIG/r0. Every figure: "
            "per_config.json.",
        )
    )
