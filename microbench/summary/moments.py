# SPDX-License-Identifier: Apache-2.0
"""Each moment of a config's server: its parts over time, as `look` shows any server."""

from __future__ import annotations

from pathlib import Path

from look.clocks import one_clock
from look.found import find
from look.instances import read_instance
from look.timeline import time_line
from microbench.analysis.trials import LoadedTrial
from page.document import TimeLine

# Few enough that a page of twelve configs stays well below 3 MB.
INTERVALS = 300
REQUESTS = 200


def moments(run_dir: Path, trials: list[LoadedTrial]) -> list[TimeLine]:
    """A folded time line per config that was measured, of its first good repeat.

    Raises RecordsError for files that `load_run` would not have read either.
    """
    first: dict[str, int] = {}
    for trial in trials:
        if trial.error is None and trial.engine_steps:
            first.setdefault(trial.config, trial.repeat)
    return [
        _moments(f"{config} r{repeat}", run_dir / config / f"r{repeat}")
        for config, repeat in first.items()
    ]


def _moments(name: str, folder: Path) -> TimeLine:
    (found, *_), _ = find(folder)
    line = time_line(
        found.name, read_instance(found), one_clock([found]), INTERVALS, REQUESTS
    )
    line.title, line.open = f"Every moment of {name}", False
    return line
