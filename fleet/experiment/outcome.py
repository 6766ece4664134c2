# SPDX-License-Identifier: Apache-2.0
"""How a run of an experiment went, as its arm.json says."""

from __future__ import annotations

from pathlib import Path

from lab.records import RecordsError
from lab.records.arm import ArmRecord
from lab.records.documents import read_document


def finished(folder: Path) -> bool:
    """Whether an earlier attempt made this run, and it went well."""
    try:
        return read_document(folder / "arm.json", ArmRecord).status == "ok"
    except RecordsError:
        return False


def line(folder: Path) -> str:
    """How a run went, for who waits for it."""
    record = read_document(folder / "arm.json", ArmRecord)
    told = f"{record.arm:24} r{record.repeat}  {record.status}"
    if record.replay_s is not None:
        told += f"  ready {record.ready_s:.0f} s, replay {record.replay_s:.0f} s"
    if (machine := record.machine) is not None:
        told += f", cores {machine.busy_mean:.0%} busy ({machine.busy_own:.0%} ours)"
        if machine.engine_excess is not None:
            told += f", forwards {machine.engine_late:+.0%}, "
            told += f"steps {machine.engine_excess:+.0%} on the simulated forward"
        if machine.saturated:
            told += "\n      NOT VALID: " + machine.saturated
    for host in record.hosts:
        if host.machine and host.machine.saturated:
            told += f"\n      NOT VALID: {host.host}: {host.machine.saturated}"
    if record.error:
        told += "\n      " + record.error.replace("\n", "\n      ")
    return told
