# SPDX-License-Identifier: Apache-2.0
"""What a server has recorded since the last look, summed up: for whoever watches.

Files are read on from where they were left, in whole lines. Nothing of this runs in the
engine.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lab.records import RecordsError

# Of a step, in us: what vLLM's own histograms of latencies use, in ms.
LAST_ENDED = 1_000
BUCKETS_US = (1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


class _Record(msgspec.Struct):
    """What is watched of any record of a step."""

    step_us: float | None = None
    schedule_us: float | None = None
    update_us: float | None = None
    execute_model_us: float | None = None
    running: int | None = None
    waiting: int | None = None
    cache_size: int | None = None
    connector_self_us: dict[str, float] = {}
    connector_calls: dict[str, int] = {}


class _Request(msgspec.Struct):
    """What is watched of a request that ended."""

    id: str
    arrival_ns: int
    finished_ns: int | None = None
    finish_reason: str | None = None
    kv_wait_ns: list[int] = []
    prompt_tokens: int = 0

    @property
    def took_ms(self) -> float:
        return ((self.finished_ns or self.arrival_ns) - self.arrival_ns) / 1e6

    @property
    def kv_wait_ms(self) -> float:
        waits = zip(self.kv_wait_ns[::2], self.kv_wait_ns[1::2], strict=False)
        return sum(end - begin for begin, end in waits) / 1e6


class Tail:
    """A file that grows; `lines` are what came since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = None, 0

    def lines(self) -> list[bytes]:
        """Whole lines, the header not among them."""
        try:
            with self._path.open("rb") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    # Begun anew, where files are kept small. The rest of the old one
                    # is lost to this reader.
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        lines = data.splitlines()
        if self._offset == 0:
            lines = lines[1:]
        self._offset += len(data)
        return lines


@dataclass
class Totals:
    """Of one instance since it was first looked at. Times are in us."""

    steps: int = 0
    bad_lines: int = 0
    step_us: float = 0.0
    scheduler_us: float = 0.0
    model_us: float = 0.0
    connector_us: float = 0.0
    by_method_us: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    slower_than: Counter[float] = field(default_factory=Counter)
    running: int = 0
    waiting: int = 0
    cache_blocks: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    last_ended: deque[_Request] = field(
        default_factory=lambda: deque(maxlen=LAST_ENDED)
    )

    def add_request(self, request: _Request) -> None:
        self.ended[request.finish_reason or "never"] += 1
        self.last_ended.append(request)

    def add(self, side: str, record: _Record) -> None:
        for name, us in record.connector_self_us.items():
            self.by_method_us[f"{side}.{name}"] += us
            self.connector_us += us
        for name, count in record.connector_calls.items():
            self.calls[f"{side}.{name}"] += count
        own = sum(record.connector_self_us.values())
        if side == "worker":
            self.model_us += max((record.execute_model_us or 0) - own, 0)
            return
        self.steps += record.step_us is not None
        self.step_us += record.step_us or 0
        scheduler_us = (record.schedule_us or 0) + (record.update_us or 0)
        self.scheduler_us += max(scheduler_us - own, 0)
        for bound in BUCKETS_US:
            self.slower_than[bound] += (record.step_us or 0) > bound
        self.running = record.running or 0
        self.waiting = record.waiting or 0
        if record.cache_size is not None:
            self.cache_blocks = record.cache_size

    def minus(self, other: Totals) -> dict[str, Any]:
        """What came since `other`, us per step, and what is there now."""
        steps = self.steps - other.steps
        per = max(steps, 1)
        ended = min(self.ended.total() - other.ended.total(), LAST_ENDED)
        return {
            "steps": steps,
            "step_us": (self.step_us - other.step_us) / per,
            "model_us": (self.model_us - other.model_us) / per,
            "scheduler_us": (self.scheduler_us - other.scheduler_us) / per,
            "connector_us": (self.connector_us - other.connector_us) / per,
            "by_method_us": {
                name: (us - other.by_method_us[name]) / per
                for name, us in self.by_method_us.most_common()
            },
            "running": self.running,
            "waiting": self.waiting,
            "cache_blocks": self.cache_blocks,
            "ended": list(self.last_ended)[-ended:] if ended else [],
        }


_STEP, _REQUEST = (msgspec.json.Decoder(kind).decode for kind in (_Record, _Request))
# By side, or None for requests.
FILES = (
    ("scheduler", "engine_step*.jsonl", _STEP),
    ("worker", "worker_step.r0.jsonl", _STEP),
    (None, "engine_request.jsonl", _REQUEST),
)


class Watched:
    """All instances below a folder; those that start later are found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RecordsError(f"{folder}: no such directory")
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self.totals: dict[str, Totals] = {}

    def read(self) -> dict[str, Totals]:
        """Read what is new; the totals by instance."""
        for side, pattern, decode in FILES:
            for path in sorted(self._folder.rglob(pattern)):
                inside = path.parent.relative_to(self._folder)
                name = str(inside) if inside.parts else self._folder.resolve().name
                totals = self.totals.setdefault(name, Totals())
                for line in self._tails.setdefault(path, Tail(path)).lines():
                    try:
                        record = decode(line)
                    except msgspec.DecodeError:
                        totals.bad_lines += 1
                        continue
                    if side is None:
                        totals.add_request(record)
                    else:
                        totals.add(side, record)
        return self.totals
