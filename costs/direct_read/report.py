# SPDX-License-Identifier: Apache-2.0
"""Rows of costs.direct_read.cost as Markdown, and what they say of the aims."""

from __future__ import annotations

from typing import Any

from costs.direct_read.rows import AGAIN, IDLE, IDLE_AGAIN, Calls, Ratio, Row
from lab.stats.markdown import DASH, number, table

# The most that being read is meant to add to a step.
AIM_SHARE = 0.02
# How the names of loads end that have a stated rate.
A_SECOND = " reads/s"


def noise_floor(found: list[Row]) -> float:
    """How far two engines that do the same are apart: the A/A interval's far end."""
    again = {row.name: row for row in found}
    edges = (*again[AGAIN].to_noop.ci95, *again[IDLE_AGAIN].to_idle.ci95)
    return max(abs(edge - 1) for edge in edges)


def verdict(found: Ratio, most: float) -> str:
    """Whether a ratio is at most `most`, as far as its interval tells."""
    low, high = found.ci95
    if high <= most:
        return "met"
    return "missed" if low > most else "undecided"


def aims_table(found: list[Row]) -> str:
    """Idle against the noise floor; each stated rate of reads against its control."""
    floor = noise_floor(found)
    (idle,) = (row for row in found if row.name == IDLE)
    body = [
        [
            f"{IDLE}: to no-op, within the noise floor of {floor:.1%}",
            str(idle.to_noop),
            verdict(idle.to_noop, 1 + floor),
        ]
    ]
    body += [
        [
            f"{row.name}: to its control, at most {AIM_SHARE:.0%} more",
            str(row.to_control),
            verdict(row.to_control, 1 + AIM_SHARE),
        ]
        for row in found
        if row.to_control is not None and row.name.endswith(A_SECOND)
    ]
    return table(["aim", "step", ""], body)


def cost_of_one_ms(row: Row) -> str:
    """ms that the engine loses by one read or lookup: lost share of time over rate."""
    assert row.to_control is not None and row.served is not None
    low, value, high = (
        number(1e3 * (1 - 1 / ratio) / row.served.per_s, 2)
        for ratio in (
            row.to_control.ci95[0],
            row.to_control.value,
            row.to_control.ci95[1],
        )
    )
    return f"{value} [{low}, {high}]"


def steps_table(found: list[Row]) -> str:
    body = []
    for row in found:
        cells = [row.name, number(row.step_us["mean"]), number(row.step_us["p50"])]
        cells += [number(row.step_us["p99"])]
        cells += [str(row.to_noop), str(row.cpu_to_noop), str(row.to_idle)]
        cells += [str(row.control_to_idle or DASH), str(row.to_control or DASH)]
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
    head = ["", "a second", "ms the engine loses by one", "% of blocks valid"]
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
        f"{found[0].rounds} rounds, {found[0].steps:,} steps a row. Ratios are of mean "
        "steps. A control is the same load on another engine: what is left of a ratio "
        "against it is not the reader's running beside the engine."
    )
    for size, of_size in by_size(found, calls).items():
        least = min(row.cached_blocks for row in of_size)
        parts += [f"## {size:,} blocks ({least:,} cached or more)"]
        parts += [steps_table(of_size), aims_table(of_size)]
        parts += [served_table(of_size)]
    parts += ["## The connector's calls of a step, in a tight loop, us"]
    parts.append(calls_table(calls))
    parts += ["## How this was made", provenance_list(facts)]
    return "\n\n".join(parts) + "\n"


def by_size(found: list[Row], calls: list[Calls]) -> dict[int, list[Row]]:
    """Rows by size: each has the same number of them, in the order measured."""
    per_size = len(found) // len(calls)
    return {
        one.cached_blocks: found[index * per_size : (index + 1) * per_size]
        for index, one in enumerate(calls)
    }


def provenance_list(facts: dict[str, Any]) -> str:
    named = ("command_line", "date_utc", "vllm_version", "python_version", "cpu_model")
    named += ("cpu_count", "kernel", "git_commit", "git_dirty")
    lines = [f"- {key}: {facts[key]}" for key in named if facts.get(key) is not None]
    for title in ("patch_hashes", "package_versions"):
        listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
        lines.append(f"- {title}: {listed}")
    return "\n".join(lines)
