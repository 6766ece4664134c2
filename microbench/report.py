# SPDX-License-Identifier: Apache-2.0
"""Write per_config.json, SUMMARY.md, report.html and figures/ from a run folder.

Reads files only; `kvtax sweep --report RUN` calls this for an earlier run.
docs/method.md has the fields and the computation.
"""

from __future__ import annotations

from pathlib import Path

from kvtax.engine.provenance import git_commit
from kvtax.records.files import write_document, write_whole
from kvtax.report.document import Section
from kvtax.verdict.analysis import Analysis, analyse
from kvtax.verdict.trials import load_run
from microbench.summary.figures import draw_all
from microbench.summary.page import code, moments, write_page, write_summary


def report(run_dir: Path, out: Path) -> Analysis:
    """Analyse `run_dir`, write all outputs into `out`, and return the analysis.

    Raises RecordsError.
    """
    run, trials = load_run(run_dir)
    analysis = analyse(run, trials, git_commit())
    out.mkdir(parents=True, exist_ok=True)
    figures = draw_all(analysis, out / "figures")
    write_document(out / "per_config.json", analysis.document)
    summary = write_summary(analysis, figures)
    write_whole(out / "SUMMARY.md", summary.encode())
    servers: list[Section] = [*moments(run_dir, trials), *code(run_dir, trials)]
    page = write_page(analysis, servers)
    write_whole(out / "report.html", page.encode())
    return analysis
