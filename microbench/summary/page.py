# SPDX-License-Identifier: Apache-2.0
"""report.html of a run: the answer on the first screen, and all that it rests on."""

from __future__ import annotations

from microbench.analysis.analysis import Analysis
from microbench.summary.additions import attribution, noise_floor, reconciliation
from microbench.summary.context import (
    accounts,
    doubts_of,
    model_note,
    provenance,
    reference,
)
from microbench.summary.curves import binned_curves
from microbench.summary.expected import expected_verdicts
from microbench.summary.figures import CURVES
from microbench.summary.fixes import before_and_after
from microbench.summary.growth import answer, hypothesis, level_table, verdicts
from microbench.summary.hosts import hosts
from microbench.summary.parts import connector_table, parts_table
from page.build import build
from page.document import Figure, Line, Page, Section

QUESTION = (
    "What does a KV connector cost per engine step, and does that grow with |cache|, "
    "the number of cached block hashes?"
)
# What users wait for: the answer's figure.
FIRST = "before_after"


def write_page(analysis: Analysis, servers: list[Section]) -> str:
    """The whole file as text; `servers` show single ones."""
    document, roles = analysis.document, analysis.roles
    figures = {name: curve_figure(analysis, name) for name in CURVES}
    first, *others = [figures.pop(FIRST), *figures.values()]
    sections = [
        verdicts(document),
        first,
        expected_verdicts(document, roles),
        *before_and_after(document, roles),
        *(hypothesis(document, roles, name) for name in roles.named("hypothesis")),
        *others,
        level_table(document),
        connector_table(document),
        parts_table(document),
        attribution(document),
        reconciliation(document, roles.baseline),
        noise_floor(document),
        reference(document, roles),
        hosts(document, roles),
        accounts(document),
        *servers,
        provenance(document),
    ]
    return build(
        Page(
            title="What a KV connector costs per engine step",
            question=QUESTION,
            answer=[answer(document), model_note(document)],
            warnings=doubts_of(analysis.doubts, document.configs),
            sections=[section for section in sections if section is not None],
            made="Another repeat's moments, or a trace of them: python -m look "
            "RUN_DIR/CONFIG/r1. Every figure: per_config.json.",
        )
    )


def curve_figure(analysis: Analysis, name: str) -> Figure | None:
    """A time against |cache|, a line per config; None if nothing was measured."""
    time, label = CURVES[name]
    curves = binned_curves(analysis.measured, time)
    if not curves.height:
        return None
    x = curves["cache_blocks"].unique().sort().to_list()
    lines = []
    for (config,), curve in curves.group_by("config", maintain_order=True):
        at = dict(zip(curve["cache_blocks"], curve.iter_rows(named=True), strict=True))
        lines.append(
            Line(
                name=config,
                y=[at[blocks]["p50_us"] if blocks in at else None for blocks in x],
                low=[at[blocks]["p25_us"] if blocks in at else None for blocks in x],
                high=[at[blocks]["p75_us"] if blocks in at else None for blocks in x],
            )
        )
    return Figure(
        title=f"{label} against |cache|",
        note="Decode-only steps of growth; repeat and batch size held; band: p25 to "
        "p75.",
        x_label="cached block hashes, |cache|",
        y_label="µs",
        x=x,
        lines=lines,
    )
