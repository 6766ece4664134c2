# SPDX-License-Identifier: Apache-2.0
"""Analyse a fleet run: report.md, report.html, analysis.json and figures/.

    python -m fleet.analyze RUN_DIR [--out DIR]

Reads files only: every folder below RUN_DIR that has an arm.json. Exit status: 0; 1 if
a run failed or a comparison is refused (the report is written, and says which and why);
2 with a message if the run cannot be read, and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleet.analyze.analysis import analyse
from fleet.analyze.figures import draw_all
from fleet.analyze.hardware import HardwareError
from fleet.analyze.records import read_run
from fleet.analyze.report import write_report
from lab.config import ConfigError
from lab.records import RecordsError
from lab.records.documents import write_document, write_whole
from page.build import build
from page.markdown import page_of


def report(run_dir: Path, out: Path, model: str, bandwidth_gbit_s: float) -> bool:
    """Write all outputs for `run_dir` into `out`; whether all of it can be compared.

    Raises RecordsError, HardwareError and ConfigError.
    """
    analysis = analyse(read_run(run_dir), model, bandwidth_gbit_s)
    out.mkdir(parents=True, exist_ok=True)
    figures = draw_all(analysis, out / "figures")
    write_document(out / "analysis.json", analysis.document)
    told = write_report(analysis.document, figures)
    write_whole(out / "report.md", told.encode())
    made = f"Made by python -m fleet.analyze {run_dir}."
    write_whole(out / "report.html", build(page_of(told, out, made)).encode())
    return analysis.sound


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.analyze", description="Analyse a fleet run."
    )
    parser.add_argument("run_dir", type=Path, help="directory with the arms' folders")
    parser.add_argument("--out", type=Path, help="where to write (default: RUN_DIR)")
    parser.add_argument(
        "--model",
        default="qwen3-coder-30b-a3b",
        help="whose KV a migrated session would move: a name in configs/models, or a "
        "config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth-gbit-s",
        type=float,
        default=100.0,
        help="over which it would move (default: %(default)s)",
    )
    chosen = parser.parse_args(argv)
    out = chosen.out or chosen.run_dir
    try:
        sound = report(chosen.run_dir, out, chosen.model, chosen.bandwidth_gbit_s)
    except (RecordsError, HardwareError, ConfigError) as error:
        print(f"fleet.analyze: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out / 'report.md'}, {out / 'analysis.json'}, {out / 'figures'}/")
    print(f"open {out / 'report.html'}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
