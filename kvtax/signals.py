# SPDX-License-Identifier: Apache-2.0
"""End a command on a signal, with its cleaning up done and the shell's exit code."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP exit with 128 + number, cleaning up first.

    SIGINT too, as a shell starts background jobs with it ignored.
    """

    def leave(number: int, _frame: object) -> None:
        # Once: a second signal must not end the cleaning up.
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in SIGNALS:
        signal.signal(number, leave)
