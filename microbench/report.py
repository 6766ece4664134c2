# SPDX-License-Identifier: Apache-2.0
"""Re-analyse a run directory: per_config.json, SUMMARY.md, report.html and figures/.

    python -m microbench.report RUN_DIR [--out DIR]

Reads files only. docs/records.md says what they hold, docs/method.md what is computed
from them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from lab.config import ConfigError
from lab.paths import REPOSITORY
from lab.records import RecordsError
from lab.records.documents import write_document, write_whole
from microbench.analysis.analysis import Analysis, analyse
from microbench.analysis.trials import load_run
from microbench.summary.figures import draw_all
from microbench.summary.moments import code, moments
from microbench.summary.page import write_page
from microbench.summary.summary import write_summary


def report(run_dir: Path, out: Path) -> Analysis:
    """Write all outputs for `run_dir` into `out`; what they were made from.

    Raises RecordsError and, for a run without roles of its own, ConfigError.
    """
    run, trials = load_run(run_dir)
    analysis = analyse(run, trials, git_commit())
    out.mkdir(parents=True, exist_ok=True)
    figures = draw_all(analysis, out / "figures")
    write_document(out / "per_config.json", analysis.document)
    summary = write_summary(analysis, figures)
    write_whole(out / "SUMMARY.md", summary.encode())
    servers = [*moments(run_dir, trials), *code(run_dir, trials)]
    page = write_page(analysis, servers)
    write_whole(out / "report.html", page.encode())
    return analysis


def git_commit() -> str | None:
    """The commit of this analysis code, None outside a repository with a commit."""
    command = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 with a message when the run directory cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.report", description="Re-analyse a run directory."
    )
    parser.add_argument("run_dir", type=Path, help="directory that holds run.json")
    parser.add_argument("--out", type=Path, help="where to write (default: RUN_DIR)")
    chosen = parser.parse_args(argv)
    out = chosen.out or chosen.run_dir
    try:
        report(chosen.run_dir, out)
    except (RecordsError, ConfigError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out / 'SUMMARY.md'}, {out / 'per_config.json'}, {out / 'figures'}/")
    print(f"open {out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
