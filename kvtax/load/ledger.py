# SPDX-License-Identifier: Apache-2.0
"""The request records of a run as they are made, and the account that ends them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvtax.records.files import LineFile
from kvtax.records.replay import ReplayHeader
from kvtax.records.requests import Account, RequestOutcome, RequestsHeader

End = TypeVar("End", bound=Account)

RECENT = 1000


class Ledger(LineFile):
    """Writes `path`, which must not exist yet (FileExistsError).

    `flush_forever` and `end` raise OSError if the records cannot be written.
    """

    def __init__(
        self, path: Path, header: RequestsHeader | ReplayHeader, lag_budget_ms: float
    ) -> None:
        super().__init__(path, header)
        self.counts = {"ok": 0, "failed": 0, "cancelled": 0}
        self._scheduled = header.scheduled
        self._lag_budget_ms = lag_budget_ms
        self._lag_ms: list[float] = []
        self._cpu_start_s = time.process_time()

    def begin(self) -> None:
        """Count CPU time from now on: what came before was preparation."""
        self._cpu_start_s = time.process_time()

    @property
    def cpu_s(self) -> float:
        """CPU time of this process since it began, in all its threads."""
        return round(time.process_time() - self._cpu_start_s, 6)

    def add(self, record: RequestOutcome, on_time: bool = True) -> None:
        """Record how a request ended. Call it once for each.

        Its lag counts if it was to be sent `on_time`.
        """
        if record.status is None:
            raise RuntimeError("a request is recorded that has not ended")
        self.counts[record.status] += 1
        if on_time and record.sent_ns is not None:
            if record.intended_ns is None:
                raise RuntimeError("a request was sent that was never due")
            self._lag_ms.append((record.sent_ns - record.intended_ns) / 1e6)
        self.append(record)

    def recent_lag_ms(self) -> dict[str, float] | None:
        """Compute the lag of the last sends."""
        return lag_summary(self._lag_ms[-RECENT:])

    def end(self, kind: type[End], **more: Any) -> End:
        """Write and return the last line. Without a sent request no run is valid."""
        lag_ms = lag_summary(self._lag_ms)
        line = kind(
            scheduled=self._scheduled,
            **self.counts,
            lag_ms=lag_ms,
            lag_budget_ms=self._lag_budget_ms,
            valid=lag_ms is not None and lag_ms["p99"] <= self._lag_budget_ms,
            **more,
        )
        self.append(line)
        self.flush().result()
        return line


def lag_summary(lag_ms: list[float]) -> dict[str, float] | None:
    """p50, p90, p99 and max of the lag, None without any."""
    if not lag_ms:
        return None
    p50, p90, p99 = np.percentile(lag_ms, [50, 90, 99]).round(3).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": round(max(lag_ms), 3)}
