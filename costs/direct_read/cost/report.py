# SPDX-License-Identifier: Apache-2.0
"""Rows of costs.direct_read.cost as Markdown, and what they say of the aims."""

from __future__ import annotations

from typing import Any

from costs.direct_read.cost.rows import AGAIN, IDLE, IDLE_AGAIN, Calls, Row
from costs.results import facts_list
from lab.stats.aims import Aim, aims_table
from lab.stats.interval import Interval
from lab.stats.markdown import DASH, number, table

# The most that being read is meant to add to a step.
AIM_SHARE = 0.02
# The end of the names of loads with a stated rate.
READS_PER_S = " reads/s"


def noise_floor(found: list[Row]) -> float:
    """How far apart two engines that do the same are: the A/A interval's far end."""
    again = {row.name: row for row in found}
    edges = (*again[AGAIN].to_noop.ci95, *again[IDLE_AGAIN].to_idle.ci95)
    return max(abs(edge - 1) for edge in edges)


def judged(found: list[Row]) -> str:
    """Idle against the noise floor; each stated rate of reads against its control."""
    floor = noise_floor(found)
    (idle,) = (row for row in found if row.name == IDLE)
    to_noop = Aim(
        what=f"{IDLE}: step, to no-op",
        at_most=1 + floor,
        unit="(the noise floor)",
    )
    return aims_table(
        [(to_noop, idle.to_noop)]
        + [
            (
                Aim(what=f"{row.name}: step, to its control", at_most=1 + AIM_SHARE),
                row.to_control,
            )
            for row in found
            if row.to_control is not None and row.name.endswith(READS_PER_S)
        ],
        ".3f",
    )


def cost_of_one_ms(row: Row) -> str:
    """ms that one read or lookup costs the engine: lost share of its time over rate."""
    assert row.to_control is not None and row.served is not None
    ms_per_s = 1e3 / row.served.per_s

    def lost(ratio: float) -> float:
        return ms_per_s * (1 - 1 / ratio)

    low, high = map(lost, row.to_control.ci95)
    return f"{Interval(lost(row.to_control.value), (low, high)):,.2f}"


def steps_table(found: list[Row]) -> str:
    body = []
    for row in found:
        cells = [row.name, number(row.step_us["mean"]), number(row.step_us["p50"])]
        cells += [number(row.step_us["p99"])]
        ratios = row.to_noop, row.cpu_to_noop, row.to_idle
        ratios += row.control_to_idle, row.to_control
        cells += [DASH if one is None else f"{one:.3f}" for one in ratios]
        cells += [f"{100 * share:.1f}" for share in row.cpu_share.values()]
        body.append(cells)
    head = ["", "step us, mean", "p50", "p99", "to no-op", "its CPU", "to idle"]
    head += ["its control to idle", "to its control"]
    head += [f"CPU %: {kind}" for kind in found[0].cpu_share]
    return table(head, body)


def served_table(found: list[Row]) -> str:
    body = []
    for row in found:
        if (got := row.served) is None:
            continue
        valid = DASH if got.valid_share is None else f"{100 * got.valid_share:.2f}"
        cells = [row.name, number(got.per_s), cost_of_one_ms(row), valid]
        for parts in (got.lookup_ms, got.whole_ms):
            cells += [number(parts[q], 2) for q in ("p50", "p99", "max")]
        body.append([*cells, f"{100 * got.reader_cpu_share:.1f}"])
    head = ["", "per second", "ms that one costs the engine", "% of blocks valid"]
    head += ["lookup ms p50", "p99", "max"]
    head += ["lookup, read, validate ms p50", "p99", "max", "reader's CPU %"]
    return table(head, body)


def calls_table(calls: list[Calls]) -> str:
    return table(
        ["cached blocks", *calls[0].us],
        [
            [f"{one.cached_blocks:,}", *(number(us, 2) for us in one.us.values())]
            for one in calls
        ],
    )


def document(found: list[Row], calls: list[Calls], facts: dict[str, Any]) -> str:
    """The whole text."""
    parts = ["# What direct_read costs the engine that is read"]
    parts.append(
        f"Decode-only steps, batch 8, a forward of {facts['forward_us']} us. "
        f"{found[0].rounds} rounds, {found[0].steps:,} steps per row. Ratios are of "
        "mean steps. A control is the same load on another engine, so a ratio to it "
        "does not contain what the peer takes by merely running."
    )
    for size, of_size in by_size(found, calls).items():
        least = min(row.cached_blocks for row in of_size)
        parts += [f"## {size:,} blocks ({least:,} cached or more)"]
        parts += [steps_table(of_size), judged(of_size)]
        parts += [served_table(of_size)]
    parts += ["## The connector's calls of a step, in a tight loop, us"]
    parts.append(calls_table(calls))
    parts += ["## How this was made", facts_list(facts)]
    return "\n\n".join(parts) + "\n"


def by_size(found: list[Row], calls: list[Calls]) -> dict[int, list[Row]]:
    """Rows by cache size: the same number each, in the order measured."""
    per_size = len(found) // len(calls)
    return {
        one.cached_blocks: found[index * per_size : (index + 1) * per_size]
        for index, one in enumerate(calls)
    }
