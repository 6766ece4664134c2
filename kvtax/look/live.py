# SPDX-License-Identifier: Apache-2.0
"""New records of running servers, summed up, and shown in the terminal.

Files are read on from where they were left, in whole lines. Nothing of this runs in the
engine.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtax.look.discover import files_below, name_of
from kvtax.records import RecordsError
from kvtax.records.parts import open_plain
from kvtax.records.requests import EngineRequest
from kvtax.records.steps import EngineStep, WorkerStep
from kvtax.report.render import visible
from kvtax.stats.distribution import share_of
from kvtax.steps.parts import side_parts

# Of a step, in us: what vLLM's own histograms of latencies use, in ms.
LAST_ENDED = 1_000
BUCKETS_US = (1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


def took_ms(request: EngineRequest) -> float:
    """Compute the time from arrival to end; 0 without an end."""
    return ((request.finished_ns or request.arrival_ns) - request.arrival_ns) / 1e6


def kv_wait_ms(request: EngineRequest) -> float:
    """Sum up the waits for KV of a request."""
    waits = zip(request.kv_wait_ns[::2], request.kv_wait_ns[1::2], strict=False)
    return sum(end - begin for begin, end in waits) / 1e6


Decoder = msgspec.json.Decoder[EngineStep | WorkerStep | EngineRequest]


class Tail:
    """A file that grows, and may be begun anew where files are kept small."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

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


@dataclass
class LiveTotals:
    """Totals of one instance since it was first read. Times are in us."""

    steps: int = 0
    bad_lines: int = 0
    step_us: float = 0.0
    # Time in which steps ran; that of overlapping ones counts once.
    covered_us: float = 0.0
    last_end_ns: int = 0
    scheduler_us: float = 0.0
    model_us: float = 0.0
    connector_us: float = 0.0
    by_method_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    slower_than: Counter[float] = field(default_factory=Counter)
    running: int = 0
    waiting: int = 0
    cache_blocks: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    last_ended: deque[EngineRequest] = field(
        default_factory=lambda: deque(maxlen=LAST_ENDED)
    )

    def add(self, decoder: Decoder, line: bytes) -> None:
        """Add a line of a file, or count it as a bad one."""
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.bad_lines += 1
            return
        match record:
            case EngineRequest():
                self.add_request(record)
            case WorkerStep():
                self.add_worker(record)
            case EngineStep():
                self.add_engine(record)

    def add_request(self, request: EngineRequest) -> None:
        self.ended[request.finish_reason or "never"] += 1
        self.last_ended.append(request)

    def add_worker(self, step: WorkerStep) -> None:
        """Add a worker's step."""
        self.model_us += self._add_side(step)

    def add_engine(self, step: EngineStep) -> None:
        """Add an engine's step."""
        self.scheduler_us += self._add_side(step)
        self.steps += step.step_us is not None
        self.step_us += step.step_us or 0
        end_ns = step.t_ns + round(1e3 * (step.step_us or 0))
        self.covered_us += max(0, end_ns - max(step.t_ns, self.last_end_ns)) / 1e3
        self.last_end_ns = max(self.last_end_ns, end_ns)
        for bound in BUCKETS_US:
            self.slower_than[bound] += (step.step_us or 0) > bound
        self.running = step.running or 0
        self.waiting = step.waiting or 0
        if step.cache_size is not None:
            self.cache_blocks = step.cache_size

    def _add_side(self, step: EngineStep | WorkerStep) -> float:
        """Add the connector's calls; return what the side itself took."""
        own_us, calls, times = side_parts(step)
        for name, us in times.items():
            self.by_method_us[name] += us
        self.calls.update(calls)
        self.connector_us += sum(times.values())
        return own_us

    def minus(self, other: LiveTotals) -> dict[str, Any]:
        """Compute us per step since `other`, and the present queues."""
        steps = self.steps - other.steps
        per = max(steps, 1)
        ended = min(self.ended.total() - other.ended.total(), LAST_ENDED)
        return {
            "steps": steps,
            "step_us": (self.step_us - other.step_us) / per,
            "covered_us": (self.covered_us - other.covered_us) / per,
            "model_us": (self.model_us - other.model_us) / per,
            "scheduler_us": (self.scheduler_us - other.scheduler_us) / per,
            "connector_us": (self.connector_us - other.connector_us) / per,
            "by_method_us": {
                name: (us - other.by_method_us.get(name, 0.0)) / per
                for name, us in sorted(
                    self.by_method_us.items(), key=lambda item: -item[1]
                )
            },
            "running": self.running,
            "waiting": self.waiting,
            "cache_blocks": self.cache_blocks,
            "ended": list(self.last_ended)[-ended:] if ended else [],
        }


# By pattern of the file's name: the record in its lines.
FILES: dict[str, Decoder] = {
    "engine_step*.jsonl": msgspec.json.Decoder(EngineStep),
    "worker_step.r0.jsonl": msgspec.json.Decoder(WorkerStep),
    "engine_request.jsonl": msgspec.json.Decoder(EngineRequest),
}


class Watched:
    """All instances below a folder; those that start later are found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RecordsError(f"{folder}: no such directory")
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self._reported: set[Path] = set()
        self.totals: dict[str, LiveTotals] = {}
        self._reading = threading.Lock()

    def read(self) -> dict[str, LiveTotals]:
        """Read what is new; a copy of the totals by instance, for any thread."""
        with self._reading:
            self._read()
            return copy.deepcopy(self.totals)

    def _read(self) -> None:
        self._forget_removed()
        for pattern, decoder in FILES.items():
            for path in files_below(self._folder, pattern):
                name = name_of(self._folder, path)
                totals = self.totals.setdefault(name, LiveTotals())
                try:
                    for line in self._tails.setdefault(path, Tail(path)).lines():
                        totals.add(decoder, line)
                except OSError as error:
                    self._report(path, error)

    def _report(self, path: Path, error: OSError) -> None:
        """Report a file that cannot be read, once; it hides no other."""
        if path not in self._reported:
            self._reported.add(path)
            told = visible(f"{path}: {error.strerror}; it is left out")
            print(told, file=sys.stderr)

    def _forget_removed(self) -> None:
        """Let go of lives whose folders were removed, and of the disk they hold."""
        for path in [one for one in self._tails if not one.parent.is_dir()]:
            self._tails.pop(path).close()
            self.totals.pop(name_of(self._folder, path), None)


EVERY_S = 1.0
SPARKS = "▁▂▃▄▅▆▇█"
HISTORY = 60
METHODS_SHOWN = 8
# Of those that ended in the last second, the longest.
REQUESTS_SHOWN = 3


class _Console(Console):
    """Console that leaves a closed pipe, and its exit code, to the command."""

    def on_broken_pipe(self) -> None:
        """Raise what `rich` makes an exit with code 1."""
        raise BrokenPipeError


def follow(watched: Watched, seconds: float = float("inf")) -> None:
    """Show what comes until Ctrl-C, or for so many seconds."""
    console = _Console()
    history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
    before = watched.read()
    end_s = time.monotonic() + seconds
    with Live(console=console, auto_refresh=False) as live:
        while time.monotonic() < end_s:
            time.sleep(EVERY_S)
            now = watched.read()
            views = []
            for name, totals in now.items():
                recent = totals.minus(before.get(name, type(totals)()))
                history[name].append(recent["connector_us"])
                views.append(view(name, recent, list(history[name])))
            live.update(
                Group(*views) if views else Text("No records yet."), refresh=True
            )
            before = now


def view(name: str, recent: dict[str, Any], history: list[float]) -> Table:
    """One instance: a row per part, and above it what is there."""
    title = (
        f"{name}: {recent['steps'] / EVERY_S:,.0f} steps/s, |cache| "
        f"{recent['cache_blocks']:,} blocks, {recent['running']} running, "
        f"{recent['waiting']} waiting"
    )
    table = Table(title=Text(visible(title)), title_justify="left")
    table.add_column("µs per step")
    table.add_column("mean", justify="right")
    table.add_column("of the time", justify="right")
    rows = [("step", recent["step_us"]), ("  model", recent["model_us"])]
    rows += [("  scheduler", recent["scheduler_us"])]
    if recent["by_method_us"]:
        rows += [("  connector", recent["connector_us"])]
    methods = sorted(recent["by_method_us"].items(), key=lambda item: -item[1])
    rows += [(visible(f"    {method}"), us) for method, us in methods[:METHODS_SHOWN]]
    for words, us in rows:
        whole_us = recent["step_us" if words == "step" else "covered_us"]
        table.add_row(Text(words), f"{us:,.1f}", f"{share_of(us, whole_us):.1%}")
    if recent["by_method_us"]:
        table.add_row("connector, last minute", spark(history), "")
    else:
        table.add_row("  connector", "unknown", "")
    for request in sorted(recent["ended"], key=lambda one: -took_ms(one))[
        :REQUESTS_SHOWN
    ]:
        words = f"request {request.id}, {request.prompt_tokens:,} tokens"
        kv = f"{kv_wait_ms(request):,.0f} ms for KV" if request.kv_wait_ns else ""
        # As text: an id may look like a mark of Rich's.
        table.add_row(Text(visible(words)), f"{took_ms(request):,.0f} ms", kv)
    return table


def spark(values: list[float]) -> str:
    """Draw a line of bars, the highest for the highest value."""
    most = max(values, default=0.0)
    if most <= 0:
        return SPARKS[0] * len(values)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round(top * value / most)] for value in values)
