# SPDX-License-Identifier: Apache-2.0
"""Compare sweeps of several occasions: `python -m tools.occasions [EVIDENCE]...`

Does a headline hold the next run? For each sweep, by default those in
benchmarks/results/sweeps/ and the committed one: the machine's grade, how many configs
are not known, and what a full cache adds to a step of the config that walks all hashes,
in vLLM's own work and in us. Then how often two sweeps agree in a statement: their
difference is within both intervals. Sweeps of which own work differs too much are
counted apart. Nothing is measured anew.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import combinations, permutations
from math import hypot
from pathlib import Path

from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.files import read_document
from kvtax.records.per_config import Evidence, PerConfig
from kvtax.report.markdown import interval, number, table
from kvtax.verdict.analysis import judge
from kvtax.verdict.changes import MOST_APART, are_comparable, sweep_changes

SWEEPS = REPOSITORY / "benchmarks" / "results" / "sweeps"
COMMITTED = REPOSITORY / "evidence.json.gz"


def main() -> int:
    """Compare and print. Raises RecordsError."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("evidence", nargs="*", type=Path, metavar="EVIDENCE")
    files = parser.parse_args().evidence
    print(report([read(file) for file in files] if files else committed()))
    return 0


def committed() -> list[PerConfig]:
    """Judge the committed sweeps that were not refused, that of SUMMARY.md last."""
    files = (*sorted(SWEEPS.glob("*.json.gz")), COMMITTED)
    sweeps = [read(file) for file in files]
    return [own for own in sweeps if own.machine is None or not own.machine.refused]


def read(file: Path) -> PerConfig:
    """Judge a sweep anew. Raises RecordsError."""
    return judge(read_document(file, Evidence)).document


def report(sweeps: list[PerConfig]) -> str:
    """Render a row per sweep, and how often two of them agree."""
    agree: dict[bool, list[bool]] = {True: [], False: []}
    for old, new in combinations(sweeps, 2):
        agree[are_comparable(old, new)] += [
            near(*pair) for pair in _statements(old, new)
        ]
    bold = [
        sum(change.changed for change in sweep_changes(old, new))
        for old, new in permutations(sweeps, 2)
    ]
    lines = [
        rows(sweeps),
        f"Two sweeps agree in {sum(agree[True])} of {len(agree[True])} statements: "
        "what a config costs over the baseline, and what a full cache adds. "
        f"`kvtax compare` calls {sum(bold)} costs changed in {len(bold)} ordered "
        "pairs.",
    ]
    if apart := agree[False]:
        lines.append(
            f"Two whose own work differs by more than a factor of {MOST_APART:g} agree "
            f"in {sum(apart)} of {len(apart)}, and `kvtax compare` says that they "
            "cannot be compared."
        )
    return "\n\n".join(lines)


def rows(sweeps: list[PerConfig]) -> str:
    """Render a row per sweep."""
    lines = []
    for document in sweeps:
        walk = next(e for e in document.configs.values() if e.verdict == "grows")
        adds, machine = walk.full_adds, document.machine
        unknown = sum(e.verdict == "inconclusive" for e in document.configs.values())
        lines.append(
            [
                str(document.provenance.get("date_utc"))[:16],
                (document.provenance.get("cpu_model") or "").split("(")[0],
                machine.grade if machine else "not graded",
                f"{unknown} of {len(document.configs)}",
                number(machine.own_us if machine else None, 0),
                interval(adds.percent if adds else None),
                number(adds.us if adds else None, 0),
            ]
        )
    head = ["began (UTC)", "CPU", "machine", "not known", "own work, µs"]
    head += ["a full cache adds to the walk's step, %", "in µs"]
    return table(head, lines)


def _statements(old: PerConfig, new: PerConfig) -> list[tuple[Estimate, Estimate]]:
    """Return the statements that both sweeps have with intervals."""
    pairs = []
    for name, before in old.configs.items():
        after = new.configs[name]
        for ours, theirs in (
            (before.over_baseline, after.over_baseline),
            (before.full_adds, after.full_adds),
        ):
            if ours and theirs and ours.percent.ci95 and theirs.percent.ci95:
                pairs.append((ours.percent, theirs.percent))
    return pairs


def near(row: Estimate, other: Estimate) -> bool:
    """Return whether two estimates differ by no more than both intervals allow."""
    reaches = [(estimate.high - estimate.low) / 2 for estimate in (row, other)]
    return abs(row.value - other.value) <= hypot(*reaches)


if __name__ == "__main__":
    sys.exit(main())
