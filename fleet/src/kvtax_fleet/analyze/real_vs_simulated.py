# SPDX-License-Identifier: Apache-2.0
"""Compare an experiment in virtual time with the same one in real time, as Markdown.

Latencies are of all requests, not only of those in the steady window, which is another
window in each run.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from kvtax.records.files import read_document
from kvtax.report.markdown import DASH, table

from kvtax_fleet.analyze.analysis import ArmAnalysis, FleetAnalysis
from kvtax_fleet.analyze.frames import TITLES, Levels

SHOWN = ("p50", "p90")


def compare_folders(real: Path, virtual: Path) -> str:
    """Compare the analysis.json of two folders. Raises RecordsError."""
    ours, theirs = (
        read_document(folder / "analysis.json", FleetAnalysis).arms
        for folder in (virtual, real)
    )
    return real_vs_simulated(theirs, ours)


def real_vs_simulated(
    real: dict[str, ArmAnalysis], virtual: dict[str, ArmAnalysis]
) -> str:
    """Make a row per arm of both: the cached share, then each latency.

    Of each the real level, and the virtual one's difference from it.
    """
    rows = []
    for arm in filter(virtual.__contains__, real):
        shares = [cached_percent(arms[arm]) for arms in (real, virtual)]
        ours, theirs = (arms[arm].latency["all"]["all"] for arms in (virtual, real))
        rows.append(
            [
                f"`{arm}`",
                f"{shares[0]:.1f}",
                f"{shares[1] - shares[0]:+.1f}",
                *(
                    _difference(getattr(ours, metric), getattr(theirs, metric), at)
                    for metric in TITLES
                    for at in SHOWN
                ),
            ]
        )
    head = ["arm", "cached, %", "virtual"]
    head += [f"{title} {at}, ms" for title in TITLES.values() for at in SHOWN]
    return table(head, rows)


def cached_percent(arm: ArmAnalysis) -> float:
    """Average the cached share of the prompt tokens, by usage, over the repeats."""
    return 100 * mean(repeat.apc.overall.apc_usage or 0 for repeat in arm.repeats)


def _difference(ours: Levels, theirs: Levels, quantile: str) -> str:
    virtual, real = ours[quantile], theirs[quantile]
    if virtual is None or real is None:
        return DASH
    return f"{real.value:,.1f} {100 * (virtual.value / real.value - 1):+.1f} %"
