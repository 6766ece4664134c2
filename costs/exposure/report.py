# SPDX-License-Identifier: Apache-2.0
"""The result of costs.exposure as Markdown and as a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from costs.results import facts_list
from lab.stats.estimate import Floats
from lab.stats.interval import Interval
from lab.stats.markdown import table
from lab.stats.rounds import difference

NONE_US = 0.0
WITHIN = 0.05


class Cell(NamedTuple):
    """What was measured: `what` is a method that was delayed, or a config."""

    mode: str
    load: float
    what: str
    delay_us: float


@dataclass(frozen=True)
class Seen:
    """One measurement: its steps, and TTFT and TPOT in ms of its requests."""

    engine: str
    first_step: int
    end_step: int
    ttft_ms: list[float]
    tpot_ms: list[float]


Measured = list[tuple[Cell, Seen, dict[str, float]]]


def report(
    told: Mapping[str, Measured], methods: Mapping[str, str], facts: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """`told` has `injected` and the curves by their forward time."""
    check = check_rows(told["injected"], methods)
    curves = {
        name: curve_rows(found) for name, found in told.items() if name != "injected"
    }
    parts = [
        "# What of a connector's work do users feel?",
        _check_text(check),
        *(_curve_text(name, rows) for name, rows in curves.items()),
        "## How this was made",
        facts_list(facts),
    ]
    document = {"provenance": facts, "check": check, "curves": curves}
    return "\n\n".join(parts) + "\n", document


def check_rows(measured: Measured, methods: Mapping[str, str]) -> list[dict[str, Any]]:
    """By mode, load, method and delay: what TPOT rose by, what was found exposed."""
    tpot_us, parts = _by_cell(measured)
    rows = []
    for cell in sorted(tpot_us):
        if cell.delay_us == NONE_US:
            continue
        (base,) = (
            one for one in tpot_us if one[:2] == cell[:2] and one.delay_us == NONE_US
        )
        column = f"{methods[cell.what]}.{cell.what}_us"
        rose = difference(tpot_us[cell], tpot_us[base])
        found = difference(parts[cell][column], parts[base][column])
        missed = difference(
            parts[cell][column] - parts[base][column], tpot_us[cell] - tpot_us[base]
        )
        rows.append(
            {
                "mode": cell.mode,
                "load": cell.load,
                "method": cell.what,
                "delay_us": cell.delay_us,
                "tpot_rose_us": Interval.of(rose),
                "exposed_us": Interval.of(found),
                "exposed_less_tpot_us": Interval.of(missed),
                "share_of_delay": (found.value - rose.value) / cell.delay_us,
            }
        )
    return rows


def curve_rows(measured: Measured) -> list[dict[str, Any]]:
    """By mode, load and config: what it adds to TPOT and TTFT over the first config."""
    tpot_us, parts = _by_cell(measured)
    ttft_us = _values(measured, lambda seen: 1e3 * float(np.mean(seen.ttft_ms)))
    floor = measured_floor(measured)
    rows = []
    for cell in sorted(tpot_us):
        base = cell._replace(what=floor)
        calls = parts[cell].get("connector_us", np.zeros(1))
        rows.append(
            {
                "mode": cell.mode,
                "load": cell.load,
                "config": cell.what,
                "tpot_us": float(np.median(tpot_us[cell])),
                "tpot_added_us": Interval.of(difference(tpot_us[cell], tpot_us[base])),
                "ttft_added_us": Interval.of(difference(ttft_us[cell], ttft_us[base])),
                "connector_exposed_us": float(np.median(calls)),
            }
        )
    return rows


def measured_floor(measured: Measured) -> str:
    """The connector that does nothing; it is measured among the others."""
    return min((cell.what for cell, *_ in measured), key=lambda name: name != "noop")


def _values(measured: Measured, of: Any) -> dict[Cell, Floats]:
    found: dict[Cell, list[float]] = {}
    for cell, seen, _ in measured:
        found.setdefault(cell, []).append(of(seen))
    return {cell: np.array(values) for cell, values in found.items()}


def _by_cell(
    measured: Measured,
) -> tuple[dict[Cell, Floats], dict[Cell, dict[str, Floats]]]:
    """Mean TPOT in us, and exposed us per step by part, of each round."""
    tpot_us = _values(measured, lambda seen: 1e3 * float(np.mean(seen.tpot_ms)))
    parts: dict[Cell, dict[str, list[float]]] = {}
    for cell, _, means in measured:
        for name, us in means.items():
            parts.setdefault(cell, {}).setdefault(name, []).append(us)
    return tpot_us, {
        cell: {name: np.array(us) for name, us in of.items()}
        for cell, of in parts.items()
    }


def _check_text(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            row["mode"],
            f"{row['load']:.0%}",
            f"`{row['method']}`",
            f"{row['delay_us']:,.0f}",
            f"{row['tpot_rose_us']:+,.0f}",
            f"{row['exposed_us']:+,.0f}",
            f"{row['share_of_delay']:+.1%}",
        ]
        for row in rows
    ]
    head = ["scheduling", "load", "method", "delay µs", "TPOT rose by µs"]
    head += ["found exposed µs", "apart, of the delay"]
    share = np.array([abs(row["share_of_delay"]) for row in rows])
    long = np.array([row["delay_us"] >= 1_000 for row in rows])
    note = (
        f"Found and felt are within {WITHIN:.0%} of the delay in "
        f"{int((share <= WITHIN).sum())} of {len(rows)} cells, and in "
        f"{int((share[long] <= WITHIN).sum())} of the {int(long.sum())} with a delay "
        f"of 1 ms or more; the median of the difference is {np.median(share):.1%}."
    )
    return "\n\n".join(
        [
            "## Is what `look` calls exposed what TPOT rises by?",
            note,
            table(head, cells),
        ]
    )


def _curve_text(name: str, rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            f"`{row['config']}`",
            row["mode"],
            f"{row['load']:.0%}",
            f"{row['tpot_us'] / 1e3:.2f}",
            f"{row['tpot_added_us']:+,.0f}",
            f"{row['ttft_added_us']:+,.0f}",
            f"{row['connector_exposed_us']:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row["config"], row["mode"]))
    ]
    head = ["config", "scheduling", "load", "TPOT ms", "added to TPOT µs"]
    head += ["added to TTFT µs", "connector's exposed µs per step"]
    title = f"## What connectors add at a full cache, forward of {name}"
    return f"{title}\n\n{table(head, cells)}"
