# SPDX-License-Identifier: Apache-2.0
"""SUMMARY.md from the document per_config.json: every number in it is from there."""

from __future__ import annotations

from microbench.analysis.analysis import Analysis
from microbench.summary.additions import attribution, noise_floor, reconciliation
from microbench.summary.context import (
    figure_list,
    model_note,
    provenance,
    reference,
    warnings,
)
from microbench.summary.expected import expected_verdicts
from microbench.summary.fixes import before_and_after
from microbench.summary.growth import answer, config_table, hypothesis, reset_table
from microbench.summary.parts import connector_table, parts_table


def write_summary(analysis: Analysis, figures: list[str]) -> str:
    """The whole text; `figures` are the names in figures/ that were drawn."""
    document, roles = analysis.document, analysis.roles
    sections = [
        "# What a KV connector costs per engine step",
        answer(document),
        model_note(document),
        "## Per config",
        config_table(document),
        expected_verdicts(document, roles),
        before_and_after(document, roles),
        *(hypothesis(document, roles, name) for name in roles.named("hypothesis")),
        "## What the connector's calls take",
        connector_table(document),
        parts_table(document),
        "## Where a step's time goes",
        attribution(document),
        "## What it adds to TPOT",
        reconciliation(document, roles.baseline),
        "## Noise floor",
        noise_floor(document),
        "## Reset check",
        reset_table(document),
        reference(document, roles),
        "## Figures",
        figure_list(figures),
        "## How this was made",
        provenance(document),
        "## Warnings",
        warnings(analysis.doubts, document.configs),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"
