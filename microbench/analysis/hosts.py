# SPDX-License-Identifier: Apache-2.0
"""What each host of a run measured: how fast it is, and its levels.

A host measures whole rounds, so what is said of configs is said within each host. What
differs between hosts is between repeats, and makes the intervals wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from lab.records.per_config import HostEntry
from lab.records.run import HostRecord
from microbench.analysis.latency import send_lag_ms
from microbench.analysis.levels import Level
from microbench.analysis.measured import Measured
from microbench.analysis.speed import times_usual
from microbench.analysis.trials import LoadedTrial

TIMES = ("schedule", "step")


def host_entries(
    hosts: Sequence[HostRecord] | None,
    trials: Sequence[LoadedTrial],
    measured: Mapping[str, Measured],
) -> dict[str, HostEntry] | None:
    """By host; None for a run on one. `trials` are those with their errors."""
    if not hosts:
        return None
    times = times_usual([trial.control for trial in trials])
    found = {}
    for host in hosts:
        own = [
            (trial, slow)
            for trial, slow in zip(trials, times, strict=True)
            if trial.repeat in host.repeats
        ]
        known = [slow for _, slow in own if slow is not None]
        found[host.host] = HostEntry(
            cpu_model=host.provenance.get("cpu_model"),
            repeats=sorted(host.repeats),
            servers=len(own),
            servers_that_count=sum(trial.steps is not None for trial, _ in own),
            times_as_slow=round(float(np.median(known)), 3) if known else None,
            send_lag_p99_ms=(send_lag_ms([trial for trial, _ in own]) or {}).get("p99"),
            p50_us={
                name: levels
                for name, one in measured.items()
                if one.level and (levels := _levels(one.level, host.repeats))
            },
        )
    return found


def _levels(level: Level, repeats: list[int]) -> dict[str, float]:
    """p50 of TIMES in the steps of `repeats` alone."""
    own = Level(level.steps.filter(pl.col("repeat").is_in(repeats)), level.mix)
    known = {time: own.quantiles(f"{time}_us") for time in TIMES}
    return {time: told["p50"] for time, told in known.items() if told}
