# SPDX-License-Identifier: Apache-2.0
"""stacks.<pid>.json: what a process was doing, at many moments.

`python -m lab.serving.py_spy` writes it, beside the engine_step.jsonl of the process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.records.documents import read_document

# Of a sweep's config: the records of the server that was sampled.
FOLDER = "sampled"


class SampledThread(msgspec.Struct):
    """A thread that ran Python."""

    tid: int
    """As the kernel has it."""
    name: str
    """As Python has it."""


class Sample(msgspec.Struct, array_like=True):
    """What one thread was doing at one moment: an array of three."""

    t_ns: int
    """CLOCK_MONOTONIC, as in the step records."""
    thread: int
    """Its place in `threads`."""
    stack: int
    """Its place in `stacks`."""


class SampledStacks(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.sampled_stacks/1"
):
    """The samples of one process."""

    pid: int
    """The process."""
    rate_hz: int
    """Samples per second that were asked for."""
    py_spy: str
    """Version of py-spy."""
    threads: list[SampledThread]
    """All that were seen."""
    frames: list[str]
    """`function (file:line)`, each once; native functions have no line."""
    stacks: list[list[int]]
    """Each once, as places in `frames`, the outermost first."""
    samples: list[Sample]
    """In order of time."""


def read_stacks(path: Path) -> SampledStacks:
    """Raises RecordsError."""
    return read_document(path, SampledStacks)
