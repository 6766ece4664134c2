# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM end the work in progress, and the run says which of them came."""

from __future__ import annotations

import asyncio
import signal


class Stop:
    """Cancels a task at SIGINT or SIGTERM; `received` is the one that came, or None."""

    received: signal.Signals | None = None

    def cancels(self, work: asyncio.Task[None]) -> None:
        """From now on, and for as long as the running loop is there."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._came, signum, work)

    def _came(self, signum: signal.Signals, work: asyncio.Task[None]) -> None:
        self.received = signum
        work.cancel()
