# SPDX-License-Identifier: Apache-2.0
"""Records that another host has made, with the times of our clock in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lab.hosts.clock import Clock
from lab.records.documents import write_whole

# Of the files that the patches write inside vLLM: lab/records says what they are.
ENGINE_MOMENTS = ("t_ns", "began_ns", "arrival_ns", "finished_ns", "kv_wait_ns")
# Of a share of replay.jsonl, whose last line is made anew.
REPLAY_MOMENTS = ("intended_ns", "sent_ns", "first_token_ns", "end_ns")
MOMENTS = ENGINE_MOMENTS + REPLAY_MOMENTS


def convert(folder: Path, clock: Clock, boot_id: str | None) -> None:
    """All records below `folder`; headers then name the boot of our clock."""
    for path in list(folder.rglob("*.jsonl*")):
        partial = path.with_name(f"{path.name}.partial")
        # They may be gigabytes.
        with path.open("rb") as theirs, partial.open("wb") as ours:
            ours.writelines(_line(line, clock, boot_id) for line in theirs)
        partial.replace(path)
    for path in folder.rglob("gpu.csv"):
        header, *rows = path.read_text().splitlines()
        converted = [",".join(_row(row.split(","), clock)) for row in rows]
        write_whole(path, "\n".join([header, *converted, ""]).encode())


def _line(line: bytes, clock: Clock, boot_id: str | None) -> bytes:
    try:
        record = msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError:
        return line  # cut off
    for name in MOMENTS:
        if record.get(name) is not None:
            record[name] = _ours(record[name], clock)
    if "boot_id" in record:
        record["boot_id"] = boot_id
    return msgspec.json.encode(record) + b"\n"


def _ours(there_ns: Any, clock: Clock) -> Any:
    if isinstance(there_ns, list):
        return [clock.ours_ns(one) for one in there_ns]
    return clock.ours_ns(there_ns)


def _row(fields: list[str], clock: Clock) -> list[str]:
    return [str(clock.ours_ns(int(fields[0]))), *fields[1:]]
