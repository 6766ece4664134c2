# SPDX-License-Identifier: Apache-2.0
"""End a command on a signal, with its cleaning up done and the shell's exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """List the signals that this process was not started to ignore (nohup, trap '')."""
    return [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]


def exit_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP exit with 128 + number, cleaning up first."""
    numbers = heeded(SIGNALS)

    def leave(number: int, _frame: object) -> None:
        # Once: a second signal must not end the cleaning up.
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, leave)
