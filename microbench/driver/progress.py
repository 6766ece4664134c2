# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: one plain line a second on stderr."""

from __future__ import annotations

import asyncio
import sys
import time

from microbench.driver.run import Run


async def print_forever(run: Run) -> None:
    """Print until cancelled."""
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        counts = ", ".join(f"{n} {status}" for status, n in run.ledger.counts.items())
        print(
            f"{time.monotonic() - start_s:.0f} s: {counts}, {run.in_flight} in flight "
            f"of {run.plan.scheduled} scheduled",
            file=sys.stderr,
            flush=True,
        )
