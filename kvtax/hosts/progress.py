# SPDX-License-Identifier: Apache-2.0
"""Progress of work on hosts: a row per host on a terminal, lines at the end.

Elsewhere than on a terminal, what has been done is for the command itself to say.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table


@dataclass
class _Row:
    doing: dict[int, float] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    lost: int = 0
    gone: str | None = None


class Progress:
    """Context manager around the work; `names` are those of its tasks.

    kvtax.hosts.cluster says which host does what; `failed` is for who reads results.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._rows: dict[str, _Row] = {}
        console = Console(stderr=True)
        # What is printed meanwhile comes above it, unless it goes to a file.
        both = sys.stdout.isatty()
        live = Live(self, console=console, refresh_per_second=2, redirect_stdout=both)
        self._live = live if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._live.stop()
            return
        for line in self.lines():
            print(line, file=sys.stderr)

    def comes(self, host: str) -> None:
        self._rows.setdefault(host, _Row()).gone = None

    def begins(self, host: str, task: int) -> None:
        self._rows[host].doing[task] = time.monotonic()

    def ends(self, host: str, task: int) -> None:
        row = self._rows[host]
        row.doing.pop(task, None)
        row.done += 1

    def failed(self, host: str) -> None:
        """Count a task that ended without a result by itself."""
        self._rows[host].failed += 1

    def leaves(self, host: str, why: str) -> None:
        """Note a lost host: its tasks go to other hosts."""
        print(f"given up {host}: {why}", file=sys.stderr)
        row = self._rows[host]
        row.lost += len(row.doing)
        row.doing.clear()
        row.gone = why

    def lines(self) -> list[str]:
        """Summarise the work of each host."""
        return [
            f"{host}: {row.done} done{_and(row.failed, 'failed')}"
            f"{_and(row.lost, 'lost')}{f'; given up: {row.gone}' if row.gone else ''}"
            for host, row in sorted(self._rows.items())
        ]

    def __rich__(self) -> Table:
        ended = sum(row.done for row in self._rows.values())
        title = f"{ended} of {len(self._names)} done"
        table = Table("host", "does", "done", "failed", "lost", title=title)
        for host, row in sorted(self._rows.items()):
            counts = [str(count) for count in (row.done, row.failed, row.lost)]
            table.add_row(host, self._does(row), *counts)
        return table

    def _does(self, row: _Row) -> str:
        if row.gone:
            return f"given up: {row.gone}"
        if not row.doing:
            return "nothing"
        first, since_s = next(iter(row.doing.items()))
        others = f" and {len(row.doing) - 1} more" if len(row.doing) > 1 else ""
        return f"{self._names[first]}, {time.monotonic() - since_s:.0f} s{others}"


def _and(count: int, what: str) -> str:
    return f", {count} {what}" if count else ""
