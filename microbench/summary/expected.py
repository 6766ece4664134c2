# SPDX-License-Identifier: Apache-2.0
"""The part of SUMMARY.md about configs whose true cost is known."""

from __future__ import annotations

from collections import Counter

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.markdown import interval, table
from microbench.analysis.expected import outcomes
from microbench.analysis.roles import Roles


def expected_verdicts(document: PerConfig, roles: Roles) -> str:
    """A section: who got the verdict that it must get. Empty if no config has one."""
    found = outcomes(document, roles)
    if not found:
        return ""
    head = ["config", "must be", "is called", "", "by these metrics, µs/1k"]
    rows = []
    for one in found:
        why = _reasons(document.configs[one.config])
        name, kind = f"`{one.config}`", f"**{one.kind}**"
        rows.append([name, one.expected, one.found, kind, why])
    counts = Counter(one.kind for one in found)
    count = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return "\n\n".join(
        [
            "## Configs whose verdict is known",
            f"Known verdicts: {len(found)}, of which {count}.",
            table(head, rows),
        ]
    )


def _reasons(entry: ConfigEntry) -> str:
    """The metrics that have the verdict of the whole, each with its slope."""
    slopes = entry.slope_us_per_1k_blocks
    return "; ".join(
        f"{metric} {interval(slopes[metric])}"
        for metric, verdict in entry.verdict_of.items()
        if verdict == entry.verdict != "flat" and slopes[metric]
    )
