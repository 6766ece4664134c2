# SPDX-License-Identifier: Apache-2.0
"""The report's table of arms in virtual time, request by request."""

from __future__ import annotations

from fleet.analyze.frames import TITLES
from lab.stats.markdown import DASH, Document, interval, table


def paired_table(document: Document) -> str:
    """Means and who was faster; nothing in real time."""
    rows = [
        [
            f"`{compared['arm']}`",
            f"`{compared['baseline']}`",
            f"{max(known['n'] for known in metrics.values() if known):,}",
            *(interval(known and known["percent"]) for known in metrics.values()),
            *(_share(known) for known in metrics.values()),
        ]
        for compared in document["comparisons"]
        if (metrics := compared["paired"]) and any(metrics.values())
    ]
    if not rows:
        return ""
    head = ["arm", "against", "requests"]
    head += [f"mean {title}, %" for title in TITLES.values()]
    head += [f"{title} shorter, % of requests" for title in TITLES.values()]
    return (
        "Request by request: in each repeat all arms get the same sessions in the same "
        "order, and each request is compared with itself. Intervals (95 %) are over "
        "sessions and repeats.\n\n" + table(head, rows)
    )


def _share(known: Document | None) -> str:
    if known is None:
        return DASH
    text, ci95 = f"{known['faster']['value']:.0f}", known["faster"]["ci95"]
    return text if ci95 is None else f"{text} [{ci95[0]:.0f}, {ci95[1]:.0f}]"
