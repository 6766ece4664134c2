# SPDX-License-Identifier: Apache-2.0
"""What would decide an inconclusive verdict: how many more servers, and minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lab.records.per_config import ConfigEntry, NoiseFloor, Stated
from lab.records.warning import RunWarning
from microbench.analysis.metrics import METRICS, PARTS
from microbench.analysis.remedies import doubt
from microbench.analysis.trials import LoadedTrial

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
        return [doubt("undecided", message + "no number of servers would tell")]
    if entry.n_repeats + more > MOST_SERVERS:
        return [doubt("undecided", message + f"more than {MOST_SERVERS} servers")]
    walls_s = [t.facts.wall_s for t in trials if t.facts and t.facts.wall_s]
    minutes = more * np.mean(walls_s) / 60 if walls_s else 0
    message += f"about {more} servers more, {minutes:.0f} minutes"
    return [doubt("undecided", message)]


def servers_more(entry: ConfigEntry, noise: NoiseFloor) -> float:
    """How many servers more would decide every part of an inconclusive config.

    Infinity where no number would; 0 where no part is open.
    """
    needed = [
        servers_needed(
            _fall(entry, name),
            entry.n_repeats,
            noise.fall_floor(name),
            METRICS[name].margin_us_per_1k_blocks,
        )
        for name in _open_parts(entry)
    ]
    return (
        math.inf
        if None in needed
        else max(needed, default=entry.n_repeats) - entry.n_repeats
    )


def _open_parts(entry: ConfigEntry) -> list[str]:
    parts = [name for name in entry.verdict_of if name in PARTS] or ["overhead"]
    return [name for name in parts if entry.verdict_of[name] == "inconclusive"]


def _fall(entry: ConfigEntry, metric: str) -> Stated | None:
    check = (entry.reset_check or {}).get(metric)
    return check and check["fall_us_per_1k_blocks"]


def servers_needed(
    fall: Stated | None, repeats: int, floor: float, margin: float
) -> int | None:
    """How many servers in all would narrow the interval enough, at this noise.

    An interval is as wide as 1 / sqrt(servers). None where the fall is so near to the
    margin, or two runs of the same thing so far apart, that nothing tells.
    """
    if fall is None or fall["ci95"] is None:
        return repeats + 1
    low, high = fall["ci95"]
    value, half = fall["value"], (high - low) / 2
    if value > margin:
        room = value - max(margin, floor)
    elif floor < margin:
        room = margin - abs(value)
    else:
        return None
    if room <= 0:
        return None
    return max(math.ceil(repeats * (half / room) ** 2), repeats + 1)
