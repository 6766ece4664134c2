# SPDX-License-Identifier: Apache-2.0
"""Cells: runs in virtual time, each with all that decides its result."""

from __future__ import annotations

from pathlib import Path

import msgspec
from kvtax.engine.null_model import Forward
from kvtax.records.files import write_document

from kvtax_fleet.launch.instance_settings import Transfer
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.arm import ArmRecord, PlannedArm
from kvtax_fleet.records.host_times import RequestTimes, StepTimes
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.replay.options import Options


class Member(msgspec.Struct, frozen=True):
    """One instance, and the arguments of the vLLM server that it stands for."""

    instance: Instance
    arguments: list[str]


class Cell(msgspec.Struct, frozen=True):
    """One run in virtual time.

    `folder` and `trace` are paths; nothing else here depends on where it runs. The
    sessions of repeat 0 come as the trace has them; `seed` draws the order of others.
    """

    folder: str
    trace: str
    planned: PlannedArm
    patches: dict[str, str]
    members: list[Member]
    forward: Forward
    host: StepTimes
    requests: RequestTimes
    overlapping: bool
    transfer: Transfer | None
    vocab_size: int
    max_model_len: int
    proxy: Settings
    replay: Options
    seed: int


def write_failed(cell: Cell, why: str) -> None:
    """Write the arm.json of a cell that failed."""
    folder = Path(cell.folder)
    folder.mkdir(parents=True, exist_ok=True)
    planned = msgspec.structs.asdict(cell.planned)
    record = ArmRecord(**planned, status="failed", error=why)
    write_document(folder / "arm.json", record)
