# SPDX-License-Identifier: Apache-2.0
"""Threads of the engine's process that keep a core busy, whatever the engine does."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kvtax.records import RecordsError
from kvtax.records.files import read_lines
from kvtax.records.parts import parts_of
from kvtax.records.steps import ThreadsHeader, ThreadTimes

FILE = "threads.jsonl"
# Threads that no connector started: vLLM's own, the recorder's, and sums of others.
OWN = re.compile(
    r"MainThread(#\d+)?$|vllm |recorder |model executor$|ended threads$", re.IGNORECASE
)
# Share of a core that a thread takes which spins; while the engine rests, a smaller one
# shows it, as other processes may need the core.
SPINS, SPINS_IDLE = 0.8, 0.2
FEWEST_S = 1.0


class SpinningThread(NamedTuple):
    """A thread, by name, and the share of a core that it takes."""

    name: str
    cores: float


def spinning_threads(folder: Path) -> list[SpinningThread]:
    """Find the threads that keep a core busy, the busiest first."""
    in_all, idle = _Spent(), _Spent()
    for part in parts_of(folder / FILE):
        try:
            records = read_lines(part, ThreadsHeader, ThreadTimes, strict=False).records
        except RecordsError:
            continue
        for before, after in pairwise(records):
            in_all.add(before, after)
            if before.step_id == after.step_id:
                idle.add(before, after)
    cores = in_all.cores()
    spin = {name for name, share in cores.items() if share >= SPINS}
    spin |= {name for name, share in idle.cores().items() if share >= SPINS_IDLE}
    threads = [SpinningThread(name, cores[name]) for name in spin if name in cores]
    return sorted(threads, key=lambda thread: -thread.cores)


class _Spent:
    """CPU time by thread, over some time."""

    def __init__(self) -> None:
        self._us: Counter[str] = Counter()
        self._ns = 0

    def add(self, before: ThreadTimes, after: ThreadTimes) -> None:
        if after.t_ns > before.t_ns:
            self._ns += after.t_ns - before.t_ns
            self._us.update(after.threads)

    def cores(self) -> dict[str, float]:
        """Return the share of a core by thread; nothing of too short a time."""
        if self._ns < FEWEST_S * 1e9:
            return {}
        return {
            name.partition("#")[0]: us * 1e3 / self._ns
            for name, us in self._us.items()
            if not OWN.match(name)
        }
