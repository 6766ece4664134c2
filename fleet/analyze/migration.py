# SPDX-License-Identifier: Apache-2.0
"""Would moving sessions help? The run's requests, on sticky sessions that may move.

Every session starts at the instance with the fewest tokens under way (ties: fewest
served, then the first) and stays, except that before every k-th turn it goes where the
fewest are under way, if that is fewer than where it is. Its context moves with it:
context tokens x KV bytes per token / bandwidth. Requests keep the send and end times
that they had in the run, so this says how even the load would get and what it would
cost to move, not what the latencies would become.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import polars as pl

from fleet.analyze.balance import Window, hotspot, max_over_min

# Experiments cut sessions to a few turns: some of these find no turn to move before.
EVERY = (None, 10, 5, 2)


@dataclass(frozen=True)
class Link:
    """What a move costs: `kv_bytes_per_token` over `bandwidth_gbit_s`."""

    kv_bytes_per_token: int
    bandwidth_gbit_s: float

    def transfer_ms(self, tokens: int) -> float:
        return (
            tokens * self.kv_bytes_per_token * 8 / (self.bandwidth_gbit_s * 1e9) * 1e3
        )


def migrations(
    requests: pl.DataFrame, instances: list[str], link: Link, window_ns: Window = None
) -> list[dict[str, Any]]:
    """One entry for each of EVERY, of one arm and repeat; [] without requests.

    `chances`: turns before which a session may move. With none, nothing is tried.
    The hotspot index is that of `window_ns`, where one is given.
    """
    usable = requests.filter(pl.col("status") == "ok").sort("sent_ns", "id")
    if usable.is_empty() or not instances:
        return []
    return [_simulate(usable, instances, link, window_ns, every) for every in EVERY]


def _simulate(
    requests: pl.DataFrame,
    instances: list[str],
    link: Link,
    window_ns: Window,
    every: int | None,
) -> dict[str, Any]:
    ongoing = dict.fromkeys(instances, 0)
    served = dict.fromkeys(instances, 0)
    ending: list[tuple[int, int, str]] = []
    home: dict[str, str] = {}
    context: dict[str, int] = {}
    turns: dict[str, int] = {}
    placed: list[str] = []
    chances = 0
    moved_tokens: list[int] = []
    for session, sent_ns, end_ns, prompt, output in requests.select(
        "session",
        "sent_ns",
        "end_ns",
        pl.coalesce("usage_prompt_tokens", "input_tokens"),
        pl.coalesce("usage_completion_tokens", "output_tokens"),
    ).iter_rows():
        while ending and ending[0][0] <= sent_ns:
            _, tokens, name = heapq.heappop(ending)
            ongoing[name] -= tokens
        turn = turns.get(session, 0)
        least = min(instances, key=lambda name: (ongoing[name], served[name]))
        if turn == 0:
            home[session] = least
        elif every and turn % every == 0:
            chances += 1
            if ongoing[least] < ongoing[home[session]]:
                home[session] = least
                moved_tokens.append(context[session])
        name = home[session]
        tokens = prompt + output
        ongoing[name] += tokens
        served[name] += tokens
        heapq.heappush(ending, (end_ns, tokens, name))
        turns[session], context[session] = turn + 1, tokens
        placed.append(name)
    simulated = requests.with_columns(
        pl.Series("instance", placed), pl.lit(None, pl.String).alias("prefill_instance")
    )
    return {
        "every_turns": every,
        "max_over_min": max_over_min(list(served.values())),
        "hotspot": hotspot(simulated, instances, window_ns),
        "chances": chances,
        "migrations": len(moved_tokens),
        "moved_tokens": sum(moved_tokens),
        "transfer_ms_total": round(link.transfer_ms(sum(moved_tokens)), 3),
        "transfer_ms_max": round(link.transfer_ms(max(moved_tokens, default=0)), 3),
    }
