# SPDX-License-Identifier: Apache-2.0
"""device_step.jsonl: when each step's forward ran on the device.

The null device writes it (lab/serving/vllm_plugin/), beside engine_step.jsonl.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.records.lines import Lines, read_lines
from lab.records.steps import FileHeader


class DeviceHeader(FileHeader, tag_field="schema", tag="kvtax.device_step/1"):
    """Header; written in the worker."""


class DeviceStep(msgspec.Struct):
    """The forward of one step."""

    step_id: int
    """As in the engine's record."""
    launched_ns: int
    """When the host launched it."""
    began_ns: int
    """When the device began it: at once, or after the forward before it."""
    ended_ns: int
    """When the device had ended it."""


def read_device_steps(path: Path) -> Lines[DeviceHeader]:
    """All forwards of a file, in order. Raises RecordsError."""
    return read_lines(path, DeviceHeader, DeviceStep)
