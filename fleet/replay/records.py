# SPDX-License-Identifier: Apache-2.0
"""The records of a replay (kvtax.replay/1): a header, one line a request, an end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from fleet.replay.options import Options
from fleet.replay.window import Window
from fleet.trace import Request
from lab.load.ledger import Outcome, lag_summary
from lab.load.lines import LineFile

RECENT = 1000


class Record(Outcome, tag_field="type", tag="request"):
    """One request of the trace. `output_tokens` is what was asked for."""

    id: str
    session: str
    turn: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    instance: str | None = None
    prefill_instance: str | None = None
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of(cls, request: Request, **fields: Any) -> Self:
        return cls(
            f"{request.session}/{request.turn}",
            request.session,
            request.turn,
            request.arrival_s,
            request.input_tokens,
            asked_output_tokens(request),
            **fields,
        )


def asked_output_tokens(request: Request) -> int:
    """A server produces at least one token, whatever the trace has."""
    return max(1, request.output_tokens)


class Records(LineFile):
    """Writes `path`, which must not exist yet (FileExistsError)."""

    def __init__(self, path: Path, options: Options, **header: Any) -> None:
        super().__init__(path)
        self.counts = {"ok": 0, "failed": 0, "cancelled": 0}
        self._cpu_start_s = time.process_time()
        self._budget_ms = options.lag_budget_ms
        self._lag_ms: list[float] = []
        self.append(
            {
                "schema": "kvtax.replay/1",
                "clock": "CLOCK_MONOTONIC",
                "load": options.load,
                "options": options,
                **header,
            }
        )
        self.flush()

    def add(self, record: Record) -> None:
        """Record how a request ended. Call it once for each."""
        self.counts[record.status] += 1
        if record.sent_ns is not None:
            self._lag_ms.append((record.sent_ns - record.intended_ns) / 1e6)
        self.append(record)

    def recent_lag_ms(self) -> dict[str, float] | None:
        """The lag of the last sends."""
        return lag_summary(self._lag_ms[-RECENT:])

    def end(self, window: Window | None) -> dict[str, Any]:
        """Write and return the last line. Raises OSError if that fails."""
        lag_ms = lag_summary(self._lag_ms)
        line = {
            "type": "end",
            "scheduled": sum(self.counts.values()),
            **self.counts,
            "lag_ms": lag_ms,
            "lag_budget_ms": self._budget_ms,
            "valid": lag_ms is not None and lag_ms["p99"] <= self._budget_ms,
            "steady": window and window._asdict(),
            "replay_cpu_s": round(time.process_time() - self._cpu_start_s, 6),
        }
        self.append(line)
        self.flush().result()
        return line
