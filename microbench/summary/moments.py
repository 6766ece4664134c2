# SPDX-License-Identifier: Apache-2.0
"""A config's server as `look` shows any server: over time, and in its code."""

from __future__ import annotations

from pathlib import Path

from lab.records import stacks
from look.clocks import one_clock
from look.found import find
from look.instances import read_instance
from look.timeline import time_line
from microbench.analysis.trials import LoadedTrial
from page.document import Flame, TimeLine

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


def code(run_dir: Path, trials: list[LoadedTrial]) -> list[Flame]:
    """A folded flame graph per process of each config that was sampled.

    Raises RecordsError if its records cannot be read.
    """
    shown = []
    for config in dict.fromkeys(trial.config for trial in trials):
        folder = run_dir / config / stacks.FOLDER
        if any(folder.glob("stacks.*.json")):
            (found, *_), _ = find(folder)
            for flame in read_instance(found).flames:
                flame.title, flame.open = f"{config}: {flame.title}", False
                shown.append(flame)
    return shown


def _moments(name: str, folder: Path) -> TimeLine:
    (found, *_), _ = find(folder)
    line = time_line(
        found.name, read_instance(found), one_clock([found]), INTERVALS, REQUESTS
    )
    line.title, line.open = f"Every moment of {name}", False
    return line
