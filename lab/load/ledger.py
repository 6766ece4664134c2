# SPDX-License-Identifier: Apache-2.0
"""The records of a run (kvtax.requests/1): one JSON line each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from lab.load.lines import LineFile
from lab.load.plan import Plan


class Outcome(msgspec.Struct, kw_only=True):
    """How a request went. Times are CLOCK_MONOTONIC ns, None if never reached."""

    status: Literal["ok", "failed", "cancelled"] | None = None
    error: str | None = None
    http_status: int | None = None
    intended_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None


class Record(Outcome, tag_field="type", tag="request"):
    """One scheduled request."""

    id: int
    phase: str
    prompt_tokens: int
    output_tokens: int | None = None


class Ledger(LineFile):
    """Writes `path`, which must not exist yet (FileExistsError).

    `flush_forever` and `end` raise OSError if the records cannot be written.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        super().__init__(path)
        self.counts = {"ok": 0, "failed": 0, "cancelled": 0}
        self.cpu_start_s = time.process_time()
        self._plan = plan
        self._lag_ms: list[float] = []
        self.append(
            {
                "schema": "kvtax.requests/1",
                "clock": "CLOCK_MONOTONIC",
                "plan": plan,
                "scheduled": plan.scheduled,
            }
        )
        self.flush()

    def phase(self, name: str, start_ns: int, reset_ns: int | None) -> None:
        """Record the start of a phase."""
        reset = {} if reset_ns is None else {"reset_ns": reset_ns}
        self.append({"type": "phase", "name": name, "start_ns": start_ns, **reset})

    def add(self, record: Record) -> None:
        """Record how a request ended. Call it once for each."""
        self.counts[record.status] += 1
        if record.sent_ns is not None:
            self._lag_ms.append((record.sent_ns - record.intended_ns) / 1e6)
        self.append(record)

    def end(self) -> dict[str, Any]:
        """Write and return the last line. Without a sent request no run is valid.

        `driver_cpu_s` is the CPU time of the driver from `cpu_start_s` on.
        """
        lag_ms = lag_summary(self._lag_ms)
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
        self.append(line)
        self.flush().result()
        return line


def lag_summary(lag_ms: list[float]) -> dict[str, float] | None:
    """p50, p90, p99 and max of the lag, None without any."""
    if not lag_ms:
        return None
    p50, p90, p99 = np.percentile(lag_ms, [50, 90, 99]).round(3).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": round(max(lag_ms), 3)}
