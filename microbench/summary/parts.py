# SPDX-License-Identifier: Apache-2.0
"""What the connector's calls take, by method, and the threads beside them."""

from __future__ import annotations

from lab.records.per_config import PerConfig
from lab.stats.markdown import interval, number
from page.document import Table

AXES = {
    "us_per_step": "per step",
    "us_per_s": "per s",
    "us_per_1k_tokens": "per 1k tokens",
}
# What takes less than this per step is in per_config.json alone.
LEAST_US = 1.0


def connector_table(document: PerConfig) -> Table:
    """Mean and slope over all steps of growth: per step, per s, per 1,000 tokens."""
    rows = []
    for name, entry in document.configs.items():
        if not entry.connector:
            continue
        row = [name]
        for axis in AXES:
            told = entry.connector[axis]
            row += [number(told["mean"]), interval(told["slope_per_1k_blocks"], 2)]
        rows.append(row)
    head = ["config"]
    for axis in AXES.values():
        head += [f"µs {axis}", "slope per 1k blocks"]
    note = (
        "All calls of the connector's methods, in scheduler and worker, over all steps "
        "of growth: nothing is left out."
    )
    return Table(
        title="What the connector's calls take", note=note, columns=head, rows=rows
    )


def parts_table(document: PerConfig) -> Table:
    """The methods, and the threads of the engine's process, that take most."""
    rows = []
    for name, entry in document.configs.items():
        for kind in ("methods", "threads"):
            for part, told in (getattr(entry, kind) or {}).items():
                if told["us_per_step"] >= LEAST_US:
                    rows.append(
                        [
                            name,
                            part if kind == "methods" else f"thread {part}",
                            number(told.get("calls_per_step"), 2),
                            number(told["us_per_step"]),
                            interval(told["slope_per_1k_blocks"], 2),
                        ]
                    )
    head = ["config", "method or thread", "calls per step", "µs per step"]
    note = (
        "Means over all steps of growth; of a method without the connector's methods "
        "that it calls, of a thread its CPU time. What takes less than "
        f"{LEAST_US:g} µs is in per_config.json."
    )
    return Table(
        title="Method by method, thread by thread",
        note=note,
        columns=[*head, "slope per 1k blocks"],
        rows=rows,
        open=False,
    )
