# SPDX-License-Identifier: Apache-2.0
"""What is to be simulated: a plan of cells, each all that decides what comes out."""

from __future__ import annotations

import msgspec

from fleet.launch.instance_settings import Transfer
from fleet.proxy.settings import Settings
from fleet.replay.options import Options
from lab.records.arm import PlannedArm
from lab.records.host_times import RequestTimes, StepTimes
from lab.records.instances import Instance
from lab.serving.settings import Forward


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
    event_delay_ns: int
    event_loss: float
    vocab_size: int
    max_model_len: int
    proxy: Settings
    replay: Options
    seed: int
