# SPDX-License-Identifier: Apache-2.0
"""What servers of several hosts cost, from the files that python -m look.reduce wrote.

    python -m look.merge FILE... [--out FILE]

Prints a table for each file, and one for all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from lab.records import RecordsError
from lab.stats.interval import Interval
from lab.stats.t_and_f import t_quantile
from look.counts import ALPHA, quantiles
from look.summed import Server, Summed, read_summed, together, write_summed
from look.text import LEAST_US, METHODS_SHOWN, aligned, warning_lines

PARTS = {
    "step_us": "step",
    "model_us": "  model",
    "scheduler_us": "  scheduler",
    "connector_us": "  connector",
    "other_us": "  other",
}
HEAD = ["us per step", "mean", "p50", "p90", "p99", "most", "share", "calls"]
SHARES = (0.5, 0.9, 0.99)
CACHE_ROWS = 10


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 with a message when a file is not what it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m look.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="all of them as one")
    chosen = parser.parse_args(argv)
    try:
        parts = {path.name: read_summed(path) for path in chosen.files}
        print(merged_text(parts))
        if chosen.out:
            write_summed(chosen.out, together(parts.values()))
    except (RecordsError, OSError) as error:
        print(f"look.merge: {error}", file=sys.stderr)
        return 1
    return 0


def merged_text(parts: dict[str, Summed]) -> str:
    """A table for each of `parts` by its name, and one for all. Raises RecordsError."""
    whole = together(parts.values())
    lines = []
    for name, one in parts.items() if len(parts) > 1 else ():
        lines += [*text_of(name, one), ""]
    lines += [*text_of("all", whole), *warning_lines(whole.warnings)]
    return "\n".join(lines)


def text_of(name: str, one: Summed) -> list[str]:
    releases = {str(server.vllm_version) for server in one.servers}
    lines = [
        f"{name}: vLLM {', '.join(sorted(releases)) or 'of unknown release'}, "
        f"{one.steps:,} steps of {len(one.servers)} servers"
    ]
    by_time = {
        time: counts
        for (time,), counts in one.counts.partition_by("time", as_dict=True).items()
    }
    if not one.steps:
        return lines
    return [
        *lines,
        "",
        *_times(by_time),
        f"  (quantiles are within {ALPHA:.0%})",
        "",
        "The connector's us per step, per 1,000 cached blocks: "
        f"{_slope('connector_us', one.servers)}",
        "",
        *_by_cache(by_time),
    ]


def _times(by_time: dict[str, pl.DataFrame]) -> list[str]:
    total_ns = by_time["step_us"]["sum_ns"].sum()
    methods = sorted(by_time.keys() - PARTS, key=lambda time: -_mean_us(by_time[time]))
    shown = [time for time in methods if _mean_us(by_time[time]) >= LEAST_US]
    rows = [HEAD]
    for part, told in PARTS.items():
        rows.append(_row(told, by_time[part], total_ns))
        for method in shown[:METHODS_SHOWN] if part == "connector_us" else ():
            told = f"    {method.removesuffix('_us')}"
            rows.append(_row(told, by_time[method], total_ns))
    return aligned(rows)


def _row(told: str, counts: pl.DataFrame, total_ns: int) -> list[str]:
    calls = counts["calls"].sum() / counts["steps"].sum()
    us = [_mean_us(counts), *quantiles(counts, SHARES), counts["most_ns"].max() / 1e3]
    return [
        told,
        *(f"{one:,.1f}" for one in us),
        f"{counts['sum_ns'].sum() / total_ns:.1%}",
        f"{calls:,.2f}" if calls else "",
    ]


def _mean_us(counts: pl.DataFrame) -> float:
    return counts["sum_ns"].sum() / counts["steps"].sum() / 1e3


def _slope(time: str, servers: Sequence[Server]) -> str:
    """The mean over servers, with Student's 95 % interval where there are several."""
    known = [one for server in servers if (one := server.slopes.get(time)) is not None]
    if not known:
        return "unknown: |cache| hardly changed, or was not recorded"
    mean = float(np.mean(known))
    if len(known) == 1:
        return f"{mean:+,.2f} (one server: no interval)"
    error = float(np.std(known, ddof=1)) / len(known) ** 0.5
    reach = float(t_quantile(0.975, len(known) - 1)) * error
    return f"{Interval(mean, (mean - reach, mean + reach)):+,.2f} over servers"


def _by_cache(by_time: dict[str, pl.DataFrame]) -> list[str]:
    """What a step and the connector take, in some ten ranges of |cache|."""
    most = by_time["step_us"]["cache_from"].max()
    if most is None:
        return []
    width = (most // 1_000 // CACHE_ROWS + 1) * 1_000
    rows = [["cached blocks", "steps", "step p50", "p99", "connector p50", "p99"]]
    for low in range(0, most + 1, width):
        inside = pl.col("cache_from").is_between(low, low + width, closed="left")
        step, connector = (
            by_time[time].filter(inside) for time in ("step_us", "connector_us")
        )
        if step.height:
            us = [*quantiles(step, (0.5, 0.99)), *quantiles(connector, (0.5, 0.99))]
            told = f"{low:,} to {low + width:,}"
            steps = f"{step['steps'].sum():,}"
            rows.append([told, steps, *(f"{one:,.1f}" for one in us)])
    return aligned(rows)


if __name__ == "__main__":
    sys.exit(main())
