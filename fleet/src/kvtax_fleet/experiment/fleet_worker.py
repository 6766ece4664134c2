# SPDX-License-Identifier: Apache-2.0
"""Process on a host of a Ray cluster that has the host's part of a fleet.

kvtax.hosts.agent starts it as `python -m kvtax_fleet.experiment.fleet_worker FOLDER`.
Its tasks and answers are JSON, of kvtax_fleet.experiment.host_fleet and of this module.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.hosts.clock import Clock, ClockServer, Reading
from kvtax.hosts.worker import DoTask, serve, undo_ray_environment
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import write_whole

from kvtax_fleet.experiment.config import Experiment
from kvtax_fleet.experiment.experiment_plan import TRACE
from kvtax_fleet.experiment.host_fleet import (
    FLEET_ERRORS,
    Answer,
    End,
    HostFleet,
    Start,
    Task,
)
from kvtax_fleet.launch.launched import Workshop

EXPERIMENT = "experiment.json"
ANSWER = "answer.json"
# Fields with times of the host's clock: in files that the patches write inside vLLM
# (kvtax/records), and in a share of replay.jsonl, whose last line is made anew.
ENGINE_TIMES = ("t_ns", "began_ns", "arrival_ns", "finished_ns", "kv_wait_ns")
REPLAY_TIMES = ("intended_ns", "sent_ns", "first_token_ns", "end_ns")


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Report the room on this host, which is `host` to the others."""

    host: str


class Room(msgspec.Struct, tag=True, frozen=True):
    """Room for so many instances, and the UDP port that reports the host's clock."""

    instances: int
    clock_port: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A task failed; why."""

    error: str


HostTask = Task | Hello
HostAnswer = Answer | Room | Failed


@contextmanager
def _prepared(folder: Path) -> Iterator[DoTask]:
    """Yield the function that answers a task of the host's part."""
    experiment = msgspec.json.decode(
        (folder / EXPERIMENT).read_bytes(), type=Experiment
    )
    undo_ray_environment()
    with ExitStack() as stack:
        if experiment.profile is not None:
            stack.enter_context(machine_lock())
            preflight.check_machine(experiment.instance_settings)
        workshop = stack.enter_context(Workshop(folder / "workshop"))
        part = HostFleet(experiment, workshop, folder / TRACE, folder / "part")
        stack.callback(part.stop)

        def answer_task(content: bytes, made: Path) -> None:
            task = msgspec.json.decode(content, type=HostTask)
            try:
                answer = _do(task, part, made)
            except (ConfigError, *FLEET_ERRORS) as error:
                answer = Failed(str(error))
            (made / ANSWER).write_bytes(msgspec.json.encode(answer))

        yield answer_task


def _do(task: HostTask, part: HostFleet, made: Path) -> HostAnswer:
    """Do the task; files that go with the answer are put into `made`."""
    if isinstance(task, Hello):
        return Room(part.room(), ClockServer(task.host).port)
    if isinstance(task, Start):
        shutil.rmtree(part.folder, ignore_errors=True)
        part.folder.mkdir()
    if not isinstance(task, End):
        return part.do(task)
    part.stop()
    if task.readings:
        clock = Clock([Reading(*reading) for reading in task.readings])
        shift_clock(part.folder, clock, task.boot_id)
    try:
        return part.do(task)
    finally:
        # Logs are wanted also if the records cannot be read.
        for path in part.folder.glob("*"):
            path.rename(made / path.name)


def shift_clock(folder: Path, clock: Clock, boot_id: str | None) -> None:
    """Convert all records below `folder` to the clock that `clock` compares with.

    Their headers get the `boot_id` of that clock's machine.
    """
    for path in list(folder.rglob("*.jsonl*")):
        partial = path.with_name(f"{path.name}.partial")
        # Line by line: records may be gigabytes.
        with path.open("rb") as theirs, partial.open("wb") as ours:
            ours.writelines(_shifted_line(line, clock, boot_id) for line in theirs)
        partial.replace(path)
    for path in folder.rglob("gpu.csv"):
        header, *rows = path.read_text().splitlines()
        shifted = [_shifted_row(row, clock) for row in rows]
        write_whole(path, "\n".join([header, *shifted, ""]).encode())


def _shifted_line(line: bytes, clock: Clock, boot_id: str | None) -> bytes:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return line  # cut off
    for name in ENGINE_TIMES + REPLAY_TIMES:
        times_ns = record.get(name)
        if isinstance(times_ns, list):
            record[name] = [clock.ours_ns(time_ns) for time_ns in times_ns]
        elif times_ns is not None:
            record[name] = clock.ours_ns(times_ns)
    if "boot_id" in record:
        record["boot_id"] = boot_id
    return msgspec.json.encode(record) + b"\n"


def _shifted_row(row: str, clock: Clock) -> str:
    time_ns, comma, rest = row.partition(",")
    return f"{clock.ours_ns(int(time_ns))}{comma}{rest}"


if __name__ == "__main__":
    sys.exit(serve(_prepared))
