# SPDX-License-Identifier: Apache-2.0
"""What would decide an inconclusive verdict: how many more servers, and minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lab.records.per_config import ConfigEntry, NoiseFloor, Stated
from lab.records.warning import RunWarning
from lab.stats.estimate import Estimate
from microbench.analysis.metrics import METRICS, PARTS
from microbench.analysis.remedies import doubt
from microbench.analysis.trials import LoadedTrial
from microbench.analysis.verdict import metric_verdict

# Beyond that the extrapolation says nothing, and nobody would wait for it.
MOST_SERVERS = 50


def undecided(
    entry: ConfigEntry, trials: Sequence[LoadedTrial], noise: NoiseFloor
) -> list[RunWarning]:
    """A warning for a config that is inconclusive, which names what is in the way."""
    if entry.verdict != "inconclusive":
        return []
    if not (open_ := _open_parts(entry)):
        return [doubt("undecided", "the step grows, and none of its parts does")]
    message = f"undecided in {', '.join(open_)}: "
    more = servers_more(entry, noise)
    if more == math.inf:
        message += f"{MOST_SERVERS} servers would not tell, by what they differ"
        return [doubt("undecided", message)]
    walls_s = [t.facts.wall_s for t in trials if t.facts and t.facts.wall_s]
    minutes = more * np.mean(walls_s) / 60 if walls_s else 0
    plural = "" if more == 1 else "s"
    message += f"about {more:.0f} server{plural} more, {minutes:.0f} min"
    return [doubt("undecided", message)]


def servers_more(entry: ConfigEntry, noise: NoiseFloor) -> float:
    """How many servers more would decide every part of an inconclusive config.

    Infinity where MOST_SERVERS would not; 0 where no part is open.
    """
    have = entry.n_repeats
    needed = [
        servers_needed(
            entry.slope_us_per_1k_blocks.get(name),
            _fall(entry, name),
            have,
            (noise.slope_floor(name), noise.fall_floor(name)),
            METRICS[name].margin_us_per_1k_blocks,
        )
        for name in _open_parts(entry)
    ]
    return max(needed, default=have) - have


def _open_parts(entry: ConfigEntry) -> list[str]:
    parts = [name for name in entry.verdict_of if name in PARTS] or ["overhead"]
    return [name for name in parts if entry.verdict_of[name] == "inconclusive"]


def _fall(entry: ConfigEntry, metric: str) -> Stated | None:
    check = (entry.reset_check or {}).get(metric)
    return check and check["fall_us_per_1k_blocks"]


def servers_needed(
    slope: Stated | None,
    fall: Stated | None,
    have: int,
    floors: tuple[float, float],
    margin: float,
) -> float:
    """How many servers in all would decide a metric, if the values stay as they are.

    An interval is as wide as 1 / sqrt(servers). `floors` are by how much slopes and
    falls of two runs of the same thing differ. Infinity beyond MOST_SERVERS.
    """
    if not (slope and fall and slope["ci95"] and fall["ci95"]):
        return have + 1
    for servers in range(have + 1, MOST_SERVERS + 1):
        narrowed = (_narrowed(each, have / servers) for each in (slope, fall))
        if metric_verdict(*narrowed, *floors, margin) != "inconclusive":
            return servers
    return math.inf


def _narrowed(found: Stated, share: float) -> Estimate:
    """`found`, known from 1 / `share` times as many servers."""
    value = found["value"]
    ends = value + math.sqrt(share) * (np.array(found["ci95"]) - value)
    # Its 95 % interval has these ends.
    return Estimate(value, np.repeat(ends, 2))
