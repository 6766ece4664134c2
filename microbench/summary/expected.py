# SPDX-License-Identifier: Apache-2.0
"""Configs whose true cost is known: did each get the verdict that it must get?"""

from __future__ import annotations

from collections import Counter

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.markdown import interval
from microbench.analysis.expected import outcomes
from microbench.analysis.roles import Roles
from page.document import Table


def expected_verdicts(document: PerConfig, roles: Roles) -> Table | None:
    """Who got the verdict that it must get. None if no config has one."""
    found = outcomes(document, roles)
    if not found:
        return None
    head = ["config", "must be", "is called", "so", "by these metrics, µs/1k"]
    rows = []
    for one in found:
        why = _reasons(document.configs[one.config])
        rows.append([one.config, one.expected, one.found, one.kind, why])
    counts = Counter(one.kind for one in found)
    count = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return Table(
        title="Configs whose verdict is known",
        note=f"Known verdicts: {len(found)}, of which {count}.",
        columns=head,
        rows=rows,
    )


def _reasons(entry: ConfigEntry) -> str:
    """The metrics that have the verdict of the whole, each with its slope."""
    slopes = entry.slope_us_per_1k_blocks
    return "; ".join(
        f"{metric} {interval(slopes[metric])}"
        for metric, verdict in entry.verdict_of.items()
        if verdict == entry.verdict != "flat" and slopes[metric]
    )
