# SPDX-License-Identifier: Apache-2.0
"""Write the results of a run folder, or of the evidence of a run.

From a folder: evidence.json.gz, a row for each hold; and from the evidence, of a folder
or by itself, per_config.json, SUMMARY.md, report.html and figures/, to the byte. Reads
files only; `kvtax sweep --report RUN` calls this for an earlier run.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec

from kvtax.engine.provenance import git_commit
from kvtax.records.files import read_document, write_document, write_whole
from kvtax.records.per_config import Evidence
from kvtax.verdict.analysis import Analysis, evidence_of, judge
from kvtax.verdict.trials import load_run
from microbench.summary.figures import draw_all
from microbench.summary.page import write_page, write_summary

EVIDENCE = "evidence.json.gz"


def report(run: Path, out: Path) -> Analysis:
    """Analyse a run folder or its EVIDENCE, write into `out`, return the analysis.

    Raises RecordsError.
    """
    out.mkdir(parents=True, exist_ok=True)
    if run.is_file():
        evidence = read_document(run, Evidence)
    else:
        evidence = evidence_of(*load_run(run), git_commit())
        packed = gzip.compress(msgspec.json.encode(evidence), mtime=0)
        write_whole(out / EVIDENCE, packed)
    analysis = judge(evidence)
    figures = draw_all(analysis, out / "figures")
    write_document(out / "per_config.json", analysis.document)
    write_whole(out / "SUMMARY.md", write_summary(analysis, figures).encode())
    write_whole(out / "report.html", write_page(analysis).encode())
    return analysis
