# SPDX-License-Identifier: Apache-2.0
"""stacks.<pid>.json: what a process was doing, at many moments.

`python -m microbench.py_spy` writes it, beside the engine_step.jsonl of the process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtax.records.files import read_document
from kvtax.records.steps import Natural

# Of a sweep's config: the records of the server that was sampled.
FOLDER = "sampled"


class SampledThread(msgspec.Struct):
    """A thread that ran Python."""

    tid: int
    """As the kernel has it."""
    name: str
    """As Python has it."""


class Sample(msgspec.Struct, array_like=True):
    """Stack of one thread at one moment: an array of three."""

    t_ns: Natural
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
    """Requested samples per second."""
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

    def __post_init__(self) -> None:
        """Refuse places that are not there; msgspec makes a DecodeError of it."""
        threads, stacks = range(len(self.threads)), range(len(self.stacks))
        for sample in self.samples:
            if sample.thread not in threads or sample.stack not in stacks:
                raise ValueError("a sample of a thread or stack that is not there")
        frames = range(len(self.frames))
        if not all(place in frames for stack in self.stacks for place in stack):
            raise ValueError("a stack with a frame that is not there")


def read_stacks(path: Path) -> SampledStacks:
    """Read the samples of a process. Raises RecordsError."""
    return read_document(path, SampledStacks)
