# SPDX-License-Identifier: Apache-2.0
"""The effect of moving sessions, simulated.

The run's requests on sticky sessions that may move. Every session starts at
the instance that had the fewest tokens so far (the first of several) and stays, except
that before every k-th turn it moves to the instance with the fewest tokens so far, if
that is fewer than at its own. Its context moves with it: context tokens x KV bytes per
token / bandwidth. Requests keep the send and end times of the run, so this shows how
even the load would get and what moving would cost, not the latencies.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import polars as pl

from kvtax_fleet.analyze.load import Skew, Window, hotspot, max_over_min

# Experiments cut sessions to a few turns: some of these find no turn to move before.
EVERY = (None, 10, 5, 2)


class MigrationRule(msgspec.Struct):
    """Outcome of moving sessions before every n-th turn; null: never."""

    every_turns: int | None
    """n; null: no moves."""
    max_over_min: float | None
    """Tokens of the busiest instance over those of the least busy; null if one served
    nothing."""
    hotspot: Skew | None
    """Skew of the tokens under way; null without any."""
    chances: int
    """Turns before which a session may move."""
    migrations: int
    """Moves."""
    moved_tokens: int
    """Tokens of KV moved."""
    transfer_ms_total: float
    """Time of all moves."""
    transfer_ms_max: float
    """Time of the longest move."""


@dataclass(frozen=True)
class Link:
    """Cost of a move: `kv_bytes_per_token` over `bandwidth_gbit_s`."""

    kv_bytes_per_token: int
    bandwidth_gbit_s: float

    def transfer_ms(self, tokens: int) -> float:
        return (
            tokens * self.kv_bytes_per_token * 8 / (self.bandwidth_gbit_s * 1e9) * 1e3
        )


def migrations(
    requests: pl.DataFrame, instances: list[str], link: Link, window_ns: Window = None
) -> list[MigrationRule]:
    """Simulate each of EVERY on one arm and repeat; [] without requests.

    A rule without chances was not tried. The hotspot index is that of `window_ns`, if
    given.
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
) -> MigrationRule:
    served = dict.fromkeys(instances, 0)
    home: dict[str, str] = {}
    context: dict[str, int] = {}
    turns: dict[str, int] = {}
    placed: list[str] = []
    chances = 0
    moved_tokens: list[int] = []
    for session, prompt, output in requests.select(
        "session",
        pl.coalesce("usage_prompt_tokens", "input_tokens"),
        pl.coalesce("usage_completion_tokens", "output_tokens"),
    ).iter_rows():
        turn = turns.get(session, 0)
        least = min(instances, key=served.__getitem__)
        if turn == 0:
            home[session] = least
        elif every and turn % every == 0:
            chances += 1
            if served[least] < served[home[session]]:
                home[session] = least
                moved_tokens.append(context[session])
        name = home[session]
        tokens = prompt + output
        served[name] += tokens
        turns[session], context[session] = turn + 1, tokens
        placed.append(name)
    simulated = requests.with_columns(
        pl.Series("instance", placed), pl.lit(None, pl.String).alias("prefill_instance")
    )
    return MigrationRule(
        every_turns=every,
        max_over_min=max_over_min(list(served.values())),
        hotspot=hotspot(simulated, instances, window_ns),
        chances=chances,
        migrations=len(moved_tokens),
        moved_tokens=sum(moved_tokens),
        transfer_ms_total=round(link.transfer_ms(sum(moved_tokens)), 3),
        transfer_ms_max=round(link.transfer_ms(max(moved_tokens, default=0)), 3),
    )
