# SPDX-License-Identifier: Apache-2.0
"""The records of a run (kvtax.requests/1): one JSON line each, appended and flushed.

A killed driver loses what it had not flushed yet and may leave a torn last line.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np

from microbench.driver.plan import Plan

FLUSH_EVERY_S = 0.25


class Record(msgspec.Struct, tag_field="type", tag="request"):
    """One scheduled request. Times are CLOCK_MONOTONIC ns, None if never reached."""

    id: int
    phase: str
    prompt_tokens: int
    status: Literal["ok", "failed", "cancelled"] | None = None
    error: str | None = None
    http_status: int | None = None
    output_tokens: int | None = None
    intended_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None


class Ledger:
    """Writes `path`, which must not exist yet (FileExistsError).

    A thread of its own does the writing, so that a slow disk delays no request.
    `flush_forever` and `end` raise OSError if the records cannot be written.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.counts = {"ok": 0, "failed": 0, "cancelled": 0}
        self.cpu_start_s = time.process_time()
        self._plan = plan
        self._lag_ms: list[float] = []
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self._file = path.open("xb")
        self._writer = ThreadPoolExecutor(1, "ledger")
        self._append(
            {
                "schema": "kvtax.requests/1",
                "clock": "CLOCK_MONOTONIC",
                "plan": plan,
                "scheduled": plan.scheduled,
            }
        )
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._writer.shutdown()
        self._file.close()

    def phase(self, name: str, start_ns: int, reset_ns: int | None) -> None:
        """Record the start of a phase."""
        reset = {} if reset_ns is None else {"reset_ns": reset_ns}
        self._append({"type": "phase", "name": name, "start_ns": start_ns, **reset})

    def add(self, record: Record) -> None:
        """Record how a request ended. Call it once for each."""
        self.counts[record.status] += 1
        if record.sent_ns is not None:
            self._lag_ms.append((record.sent_ns - record.intended_ns) / 1e6)
        self._append(record)

    def end(self) -> dict[str, Any]:
        """Write and return the last line. Without a sent request no run is valid.

        `driver_cpu_s` is the CPU time of the driver from `cpu_start_s` on.
        """
        lag_ms = None
        if self._lag_ms:
            p50, p90, p99 = np.percentile(self._lag_ms, [50, 90, 99]).round(3).tolist()
            worst = round(max(self._lag_ms), 3)
            lag_ms = {"p50": p50, "p90": p90, "p99": p99, "max": worst}
        budget_ms = self._plan.lag_budget_ms
        line = {
            "type": "end",
            "scheduled": self._plan.scheduled,
            **self.counts,
            "lag_ms": lag_ms,
            "lag_budget_ms": budget_ms,
            "valid": lag_ms is not None and lag_ms["p99"] <= budget_ms,
            "driver_cpu_s": round(time.process_time() - self.cpu_start_s, 6),
        }
        self._append(line)
        self.flush().result()
        return line

    def flush(self) -> Future[None]:
        """Have all lines so far handed to the kernel, in order."""
        lines, self._lines = self._lines, []
        return self._writer.submit(self._write, b"".join(lines))

    def _write(self, lines: bytes) -> None:
        self._file.write(lines)
        self._file.flush()

    async def flush_forever(self) -> None:
        """Flush at the promised interval until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await asyncio.wrap_future(self.flush())

    def _append(self, line: Any) -> None:
        self._lines.append(self._encode(line) + b"\n")
