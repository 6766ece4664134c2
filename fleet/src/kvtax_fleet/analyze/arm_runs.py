# SPDX-License-Identifier: Apache-2.0
"""Read the files of a fleet run: one folder per arm and repeat, found by its arm.json.

kvtax/records describes the files. The proxy names the instance that served a request in
its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvtax.records import RecordsError
from kvtax.records.files import read_document, read_lines
from kvtax.records.requests import (
    ReplayedRequest,
    ReplayEnd,
    ReplayHeader,
)

from kvtax_fleet.records.arm import ArmRecord
from kvtax_fleet.records.decisions import DecisionEnd, DecisionRecord, DecisionsHeader


@dataclass(frozen=True)
class ArmRun:
    """One arm in one repeat. `end` is None if the replayer was killed.

    `counters`: /metrics texts (before, after) by instance.
    """

    folder: Path
    info: ArmRecord
    requests: list[ReplayedRequest]
    end: ReplayEnd | None
    decisions: list[DecisionRecord]
    decision_ends: list[DecisionEnd]
    counters: dict[str, tuple[str, str]]
    torn_lines: int


def read_run(run_dir: Path) -> list[ArmRun]:
    """Read every arm and repeat below `run_dir`: by concurrency, the baseline first.

    Raises RecordsError when there is none, or a file of one is wrong.
    """
    files = sorted(run_dir.rglob("arm.json"))
    if not files:
        raise RecordsError(f"{run_dir}: no arm.json in it or below: not a fleet run")
    runs = [read_arm(path.parent) for path in files]
    return sorted(runs, key=_place)


def _place(run: ArmRun) -> tuple[int, bool, str, int]:
    info = run.info
    return info.concurrency or 0, info.arm != info.baseline, info.arm, info.repeat


def read_arm(folder: Path) -> ArmRun:
    """Read the files of one arm and repeat. Without replay.jsonl it has no requests."""
    replayed, torn = _records(
        folder / "replay.jsonl", ReplayHeader, ReplayedRequest | ReplayEnd
    )
    decided, torn_too = _records(
        folder / "decisions.jsonl", DecisionsHeader, DecisionRecord | DecisionEnd
    )
    ends = [line for line in replayed if isinstance(line, ReplayEnd)]
    info = read_document(folder / "arm.json", ArmRecord)
    requests = [line for line in replayed if isinstance(line, ReplayedRequest)]
    return ArmRun(
        folder=folder,
        info=info,
        requests=requests,
        end=ends[-1] if ends else None,
        decisions=[line for line in decided if isinstance(line, DecisionRecord)],
        decision_ends=[line for line in decided if isinstance(line, DecisionEnd)],
        counters=_counters(folder / "metrics"),
        torn_lines=torn + torn_too,
    )


def _records(
    path: Path, header_kind: type[msgspec.Struct], record_kind: Any
) -> tuple[list[Any], int]:
    """Read the records and count torn lines; none if a run did not come that far."""
    if not path.exists():
        return [], 0
    lines = read_lines(path, header_kind, record_kind)
    return lines.records, lines.torn_lines


def _counters(folder: Path) -> dict[str, tuple[str, str]]:
    """Read the text of /metrics before and after, of each instance that has both."""
    files = {}
    for before in sorted(folder.glob("*.before.prom")):
        name = before.name.removesuffix(".before.prom")
        after = folder / f"{name}.after.prom"
        if after.exists():
            files[name] = (before.read_text(), after.read_text())
    return files
