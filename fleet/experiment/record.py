# SPDX-License-Identifier: Apache-2.0
"""arm.json: what a run was, and why it may be trusted (schema kvtax.arm/1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fleet.experiment.freshness import Freshness
from fleet.experiment.machine import MachineLoad
from fleet.experiment.workload import TraceFacts
from lab.records.documents import write_document
from lab.records.roles import Role

SCHEMA = "kvtax.arm/1"


class ArmRecord(msgspec.Struct):
    """arm.json: fleet/experiment/README.md says what each field is."""

    experiment: str
    arm: str
    repeat: int
    policy: str
    parameters: dict[str, Any]
    connector: str
    cache_state: str
    concurrency: int
    baseline: str
    same_as: str | None
    open_loop: bool
    time_scale: float
    time_factor: float
    trace: TraceFacts
    profile: dict[str, Any] | None
    versions: dict[str, Any]
    schema: str = SCHEMA
    report: Role | None = None
    instances: list[dict[str, Any]] = []
    patches: dict[str, str] = {}
    freshness: Freshness | None = None
    machine: MachineLoad | None = None
    started_utc: str = ""
    ready_s: float | None = None
    replay_s: float | None = None
    wall_s: float | None = None
    peak_rss_mib: dict[str, float] = {}
    status: str = "ok"
    error: str | None = None


def write_record(folder: Path, record: ArmRecord) -> None:
    """Write arm.json whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder / "arm.json", record)
