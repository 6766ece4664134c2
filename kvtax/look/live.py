# SPDX-License-Identifier: Apache-2.0
"""New records of running servers, summed up by engine.

Files are read on from where they were left, in whole lines. Nothing of this runs in the
engine. Of records that are there at the start, no more is read than a first scrape has
time for: counters need no past.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvtax.look.discover import engine_of, files_below
from kvtax.records import RecordsError
from kvtax.records.parts import open_plain
from kvtax.records.requests import EngineRequest
from kvtax.records.steps import EngineStep, WorkerStep
from kvtax.report.render import visible
from kvtax.steps.parts import side_parts

# Of a step, in us: what vLLM's own histograms of latencies use, in ms.
BUCKETS_US = (1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
# Bytes of records that are read of what is there at the start: some 0.3 s.
MOST_AT_START = 8 << 20
# A recorder writes at least every 10 s, also while its engine is idle.
SILENT_S = 60.0

Decoder = msgspec.json.Decoder[EngineStep | WorkerStep | EngineRequest]
# By pattern of the file's name: the record in its lines.
FILES: dict[str, Decoder] = {
    "engine_step.jsonl": msgspec.json.Decoder(EngineStep),
    "worker_step.r0.jsonl": msgspec.json.Decoder(WorkerStep),
    "engine_request.jsonl": msgspec.json.Decoder(EngineRequest),
}


class Tail:
    """A file that grows, and may be begun anew where files are kept small."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._is_skipped = False

    def skip(self) -> None:
        """Leave out what is in the file now, but for its last line."""
        self._is_skipped = True

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines that came since the last call, without headers."""
        yield from self._rest()
        with suppress(FileNotFoundError):
            inode = self._path.stat().st_ino
            if self._file is None or os.fstat(self._file.fileno()).st_ino != inode:
                # What was written to the old file meanwhile.
                yield from self._rest()
                self.close()
                self._file = open_plain(self._path)
                if self._is_skipped:
                    self._is_skipped = False
                    _seek_last_line(self._file)
                yield from self._rest()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _rest(self) -> Iterator[bytes]:
        while self._file:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)
                return
            if start:
                yield line


def _seek_last_line(file: BinaryIO) -> None:
    """Go to the beginning of the last whole line, in the last 64 KiB of the file."""
    size = file.seek(0, os.SEEK_END)
    first = max(size - (64 << 10), 0)
    file.seek(first)
    end = file.read().rstrip(b"\n")
    file.seek(first + end.rfind(b"\n") + 1 if b"\n" in end else 0)


@dataclass
class Gauges:
    """The last state of one life of an engine; None where it is not recorded."""

    running: int | None = None
    waiting: int | None = None
    cache_blocks: int | None = None


@dataclass
class LiveTotals:
    """Totals of one engine, over its lives, since it was first read. Times in us."""

    steps: int = 0
    bad_lines: int = 0
    step_us: float = 0.0
    # Time in which steps ran; that of overlapping ones counts once.
    covered_us: float = 0.0
    scheduler_us: float = 0.0
    model_us: float = 0.0
    connector_us: float = 0.0
    by_method_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    slower_than: Counter[float] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    gauges: dict[Path, Gauges] = field(default_factory=dict)
    last_end_ns: dict[Path, int] = field(default_factory=dict)

    def add(self, life: Path, decoder: Decoder, line: bytes) -> None:
        """Add a line of a file of `life`, or count it as a bad one."""
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.bad_lines += 1
            return
        match record:
            case EngineRequest():
                self.ended[record.finish_reason or "never"] += 1
            case WorkerStep():
                self.model_us += self._add_side(record)
            case EngineStep():
                self._add_engine(life, record)

    def _add_engine(self, life: Path, step: EngineStep) -> None:
        self.scheduler_us += self._add_side(step)
        self.steps += step.step_us is not None
        self.step_us += step.step_us or 0
        end_ns = step.t_ns + round(1e3 * (step.step_us or 0))
        before_ns = self.last_end_ns.get(life, 0)
        self.covered_us += max(0, end_ns - max(step.t_ns, before_ns)) / 1e3
        self.last_end_ns[life] = max(before_ns, end_ns)
        for bound in BUCKETS_US:
            self.slower_than[bound] += (step.step_us or 0) > bound
        gauges = self.gauges.setdefault(life, Gauges())
        gauges.running, gauges.waiting = step.running, step.waiting
        if step.cache_size is not None:
            gauges.cache_blocks = step.cache_size

    def _add_side(self, step: EngineStep | WorkerStep) -> float:
        """Add the connector's calls; return what the side itself took."""
        own_us, calls, times = side_parts(step)
        for name, us in times.items():
            self.by_method_us[name] += us
        self.calls.update(calls)
        self.connector_us += sum(times.values())
        return own_us

    @property
    def present(self) -> Gauges | None:
        """The state of the newest life; None once nothing writes it any more."""
        life = max(self.gauges, key=lambda path: path.name, default=None)
        if life is None or time.time() - _written_s(life) > SILENT_S:
            return None
        return self.gauges[life]


def _written_s(life: Path) -> float:
    """When a file of `life` was last written, by the wall clock; 0 without files."""
    written_s = [0.0]
    with suppress(OSError):
        written_s += [entry.stat().st_mtime for entry in os.scandir(life)]
    return max(written_s)


class Watched:
    """All engines below a folder; those that start later are found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RecordsError(f"{folder}: no such directory")
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self._reported: set[Path] = set()
        self._totals: dict[str, LiveTotals] = {}
        self._reading = threading.Lock()
        self._skip_old()

    def read(self) -> dict[str, LiveTotals]:
        """Read what is new; a copy of the totals by engine, for any thread."""
        with self._reading:
            self._forget_removed()
            for path, decoder in self._files():
                engine = engine_of(self._folder, path)
                totals = self._totals.setdefault(engine, LiveTotals())
                try:
                    for line in self._tails.setdefault(path, Tail(path)).lines():
                        totals.add(path.parent, decoder, line)
                except OSError as error:
                    self._report(path, error)
            return copy.deepcopy(self._totals)

    def _files(self) -> Iterator[tuple[Path, Decoder]]:
        for pattern, decoder in FILES.items():
            for path in files_below(self._folder, pattern):
                yield path, decoder

    def _skip_old(self) -> None:
        """Leave out what is there in files for which a first scrape has no time."""
        left = MOST_AT_START
        sizes: dict[Path, tuple[float, int]] = {}
        for path, _ in self._files():
            with suppress(OSError):
                stat = path.stat()
                sizes[path] = (stat.st_mtime, stat.st_size)
        for path in sorted(sizes, key=lambda path: sizes[path], reverse=True):
            left -= sizes[path][1]
            if left < 0:
                self._tails[path] = Tail(path)
                self._tails[path].skip()

    def _report(self, path: Path, error: OSError) -> None:
        """Report a file that cannot be read, once; it hides no other."""
        if path not in self._reported:
            self._reported.add(path)
            message = visible(f"{path}: {error.strerror}; it is left out")
            print(message, file=sys.stderr)

    def _forget_removed(self) -> None:
        """Let go of lives whose folders were removed, and of the disk they hold.

        The counters of an engine stay as long as one of its lives does.
        """
        for path in [path for path in self._tails if not path.parent.is_dir()]:
            self._tails.pop(path).close()
            engine = engine_of(self._folder, path)
            if totals := self._totals.get(engine):
                totals.gauges.pop(path.parent, None)
                totals.last_end_ns.pop(path.parent, None)
        engines = {engine_of(self._folder, path) for path in self._tails}
        for engine in self._totals.keys() - engines:
            del self._totals[engine]
