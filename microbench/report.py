# SPDX-License-Identifier: Apache-2.0
"""Write the results of a run folder, or of the evidence of a run.

From a folder: per_config.json, SUMMARY.md, report.html, figures/ and evidence.json.gz,
a row for each hold. From that the first two, and the figures of holds, can be made
again. Reads files only; `kvtax sweep --report RUN` calls this for an earlier run.
"""

from __future__ import annotations

import gzip
from collections.abc import Collection
from pathlib import Path

import msgspec

from kvtax.engine.provenance import git_commit
from kvtax.records.files import read_document, write_document, write_whole
from kvtax.records.per_config import Evidence
from kvtax.report.document import Section
from kvtax.verdict.analysis import Analysis, evidence_of, judge, steps_of_run
from kvtax.verdict.trials import load_run
from microbench.summary.figures import draw_all
from microbench.summary.page import code, moments, write_page, write_summary

EVIDENCE = "evidence.json.gz"


def report(run: Path, out: Path) -> Analysis:
    """Analyse a run folder or its EVIDENCE, write into `out`, return the analysis.

    Raises RecordsError.
    """
    if run.is_file():
        evidence = read_document(run, Evidence)
        analysis = judge(evidence)
        drawn = draw_all(analysis, {}, out / "figures")
        _write_results(analysis, {*drawn, *evidence.figures}, out)
        return analysis
    record, trials = load_run(run)
    steps = steps_of_run(record, trials)
    evidence = evidence_of(record, trials, steps, git_commit())
    analysis = judge(evidence)
    out.mkdir(parents=True, exist_ok=True)
    evidence.figures = draw_all(analysis, steps, out / "figures")
    packed = gzip.compress(msgspec.json.encode(evidence), mtime=0)
    write_whole(out / EVIDENCE, packed)
    _write_results(analysis, evidence.figures, out)
    servers: list[Section] = [*moments(run, trials), *code(run, trials)]
    page = write_page(analysis, steps, servers)
    write_whole(out / "report.html", page.encode())
    return analysis


def _write_results(analysis: Analysis, figures: Collection[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_document(out / "per_config.json", analysis.document)
    summary = write_summary(analysis, figures)
    write_whole(out / "SUMMARY.md", summary.encode())
