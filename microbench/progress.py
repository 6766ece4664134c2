# SPDX-License-Identifier: Apache-2.0
"""How a sweep shows where it is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from microbench.trial import PlannedTrial, TrialRecord


class Progress:
    """Context manager around the trials of `plan`, told when each begins and ends."""

    def __init__(self, plan: list[PlannedTrial]) -> None:
        self._plan = plan
        self._state = ["" for _ in plan]
        self._started = 0.0
        self._console = Console()
        self._live = (
            Live(self, console=self._console, refresh_per_second=2)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, index: int) -> None:
        self._started = time.monotonic()
        self._state[index] = "running"
        if not self._live:
            trial = self._plan[index]
            count = f"[{index + 1}/{len(self._plan)}]"
            print(f"{count} {trial.config}, repeat {trial.repeat}", flush=True)

    def end(self, index: int, trial: TrialRecord) -> None:
        outcome = trial.status
        if trial.error:
            outcome += ": " + trial.error.partition("\n")[0]
        elif trial.wall_s and trial.ready_s:
            outcome += f", ready in {trial.ready_s:.0f} s, {trial.wall_s:.0f} s in all"
        self._state[index] = outcome
        if not self._live:
            print(f"    {outcome}", flush=True)

    def __rich__(self) -> Table:
        table = Table("config", "repeat", "state")
        for trial, state in zip(self._plan, self._state, strict=True):
            if state == "running":
                state = f"running, {time.monotonic() - self._started:.0f} s"
            table.add_row(trial.config, str(trial.repeat), state)
        return table
