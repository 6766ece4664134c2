# SPDX-License-Identifier: Apache-2.0
"""What a host of a fleet is asked, and its answers, as they go over the network."""

from __future__ import annotations

from typing import Any

import msgspec

from fleet.experiment.config import Arm
from fleet.experiment.part import PartFacts
from fleet.experiment.replayers import Work
from lab.records.arm import MachineLoad

EXPERIMENT = "experiment.json"
ANSWER = "answer.json"


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Can it do its part? It is known as `host` to the others."""

    host: str


class Fits(msgspec.Struct, tag=True, frozen=True):
    """It has room for so many instances, and says at `clock_port` what time it is."""

    room: int
    clock_port: int


class Start(msgspec.Struct, tag=True, frozen=True):
    """Begin to start these instances of the arm's fleet, on the address `host`."""

    arm: Arm
    numbers: list[int]
    host: str


class Watch(msgspec.Struct, tag=True, frozen=True):
    """How is it? And with `memory`, how much did the instances take at most?"""

    memory: bool = False


class Seen(msgspec.Struct, tag=True, frozen=True):
    """All is well; `facts` once all instances answer, and the replayer's exit status
    once it has ended."""

    facts: PartFacts | None = None
    peak_rss_mib: dict[str, float] = {}
    replayer_ready: bool = False
    replayer_status: int | None = None


class Load(msgspec.Struct, tag=True, frozen=True):
    """Requests are about to come: watch the machine."""


class Replay(msgspec.Struct, tag=True, frozen=True):
    """Begin a replayer of this trace file."""

    work: Work
    trace: bytes


class Go(msgspec.Struct, tag=True, frozen=True):
    """The replayer shall begin at this moment of its host's clock."""

    start_ns: int


class End(msgspec.Struct, tag=True, frozen=True):
    """Stop all. Records are to have the times of the clock that `readings` are of, as
    lab.hosts.clock makes them, and name the boot of that machine."""

    readings: list[Any]
    boot_id: str | None


class Ended(msgspec.Struct, tag=True, frozen=True):
    """All has ended; beside this answer is what there is to keep."""

    machine: MachineLoad | None


class Done(msgspec.Struct, tag=True, frozen=True):
    """It was done."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The run has failed here; why."""

    error: str


Task = Hello | Start | Watch | Load | Replay | Go | End
Answer = Fits | Seen | Ended | Done | Failed
