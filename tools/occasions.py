# SPDX-License-Identifier: Apache-2.0
"""Compare sweeps of several occasions: `python -m tools.occasions [EVIDENCE]...`

Does a headline hold the next run? For each sweep, by default those in
benchmarks/results/sweeps/ and the committed one: the machine's grade, how many configs
are not known, what a full cache adds to a held step of the config that walks all
hashes, and its slope while the cache grows, in us and in yardsticks of its own servers.
Then, by unit, in how many ordered pairs of sweeps the one's interval holds the other's
figure, and in how many they lie as near as two servers of one config may, by the one's
own servers: a slope in growth is of one server, and its interval does not know that.
Nothing is measured anew.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.files import read_document
from kvtax.records.per_config import Evidence
from kvtax.report.markdown import interval, number, table
from kvtax.stats.processes import RunSpread
from kvtax.verdict.analysis import judge
from kvtax.verdict.metrics import TIMED

SWEEPS = REPOSITORY / "benchmarks" / "results" / "sweeps"
COMMITTED = REPOSITORY / "evidence.json.gz"
UNITS = ("µs", "yardsticks")


class Occasion(NamedTuple):
    """One sweep: its headline by unit, None where it was not measured."""

    began: str
    grade: str
    unknown: int
    configs: int
    yardstick_us: float | None
    adds: dict[str, Estimate | None]
    growth: dict[str, Estimate | None]
    growth_over_held: float | None
    spread: RunSpread | None
    servers: int


def main() -> int:
    """Compare and print. Raises RecordsError."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("evidence", nargs="*", type=Path, metavar="EVIDENCE")
    files = parser.parse_args().evidence
    print(report([read(file) for file in files] if files else committed()))
    return 0


def committed() -> list[Occasion]:
    """Read the committed sweeps, the one of SUMMARY.md last."""
    return [read(file) for file in (*sorted(SWEEPS.glob("*.json.gz")), COMMITTED)]


def read(file: Path) -> Occasion:
    """Read the headline of a sweep. Raises RecordsError."""
    return occasion(read_document(file, Evidence))


def occasion(evidence: Evidence) -> Occasion:
    """Judge a sweep anew, and select its headline."""
    analysis = judge(evidence)
    configs, machine = analysis.document.configs, analysis.document.machine
    (name, *_) = analysis.roles.named("hypothesis")
    walk = configs[name]
    held, slope = walk.held.get(TIMED), walk.slope_us_per_1k_blocks.get("schedule")
    growth = walk.growth_slope_us_per_1k_blocks
    servers = machine.servers if machine else []
    own = [s.yardstick_us for s in servers if s.config == name and s.yardstick_us]
    yardstick_us = float(np.mean(own)) if own else None
    return Occasion(
        began=str(evidence.run.provenance.get("date_utc"))[:16],
        grade=machine.grade if machine else "not graded",
        unknown=sum(one.verdict == "inconclusive" for one in configs.values()),
        configs=len(configs),
        yardstick_us=yardstick_us,
        adds=_by_unit(held.full_adds_us if held else None, yardstick_us),
        growth=_by_unit(growth, yardstick_us),
        growth_over_held=growth.value / slope.value if growth and slope else None,
        spread=RunSpread.of(
            np.array(one.log_p50["schedule"])
            for one in evidence.configs.values()
            if "schedule" in one.log_p50
        ),
        servers=len(own),
    )


def _by_unit(
    figure: Estimate | None, yardstick_us: float | None
) -> dict[str, Estimate | None]:
    return {"µs": figure, "yardsticks": _over(figure, yardstick_us)}


def _over(figure: Estimate | None, yardstick_us: float | None) -> Estimate | None:
    if figure is None or figure.ci95 is None or not yardstick_us:
        return None
    low, high = figure.ci95
    return Estimate(
        figure.value / yardstick_us, (low / yardstick_us, high / yardstick_us)
    )


def holds(one: Estimate | None, other: Estimate | None) -> bool | None:
    """Return whether the interval of `one` holds the figure of `other`."""
    if one is None or other is None or one.ci95 is None:
        return None
    low, high = one.ci95
    return low <= other.value <= high


def near(
    spread: RunSpread | None, one: Estimate | None, other: Estimate | None, servers: int
) -> bool | None:
    """Return whether two figures, each of so many servers, may be of equal servers."""
    if spread is None or not one or not other or min(one.value, other.value) <= 0:
        return None
    apart = abs(math.log(one.value / other.value))
    return apart <= spread.reach(servers, servers)


def report(occasions: list[Occasion]) -> str:
    """Render a row per sweep, and how often one's figure is that of another."""
    full = [(one.adds, one.spread, max(one.servers, 1)) for one in occasions]
    growth = [(one.growth, one.spread, 1) for one in occasions]
    said = (
        "The interval of one sweep holds the figure of another (they lie as near as "
        f"two servers of one config may): of a full cache {_counts(full)}; of growth "
        f"{_counts(growth)}."
    )
    return f"{rows(*occasions)}\n\n{said}"


def rows(*occasions: Occasion) -> str:
    """Render a row per sweep."""
    head = ["began (UTC)", "machine", "not known", "yardstick, µs"]
    head += [f"a full cache adds to the walk, {unit}" for unit in UNITS]
    head += [f"in growth, {unit} per 1,000 blocks" for unit in UNITS]
    head += ["in growth, over held"]
    lines = [
        [
            one.began,
            one.grade,
            f"{one.unknown} of {one.configs}",
            number(one.yardstick_us, 0),
            interval(one.adds["µs"], 0),
            interval(one.adds["yardsticks"], 2),
            interval(one.growth["µs"]),
            interval(one.growth["yardsticks"], 4),
            number(one.growth_over_held, 2),
        ]
        for one in occasions
    ]
    return table(head, lines)


def _counts(
    figures: list[tuple[dict[str, Estimate | None], RunSpread | None, int]],
) -> str:
    said = []
    for unit in UNITS:
        pairs = [
            (holds(of[unit], other[unit]), near(spread, of[unit], other[unit], servers))
            for (of, spread, servers), (other, _, _) in permutations(figures, 2)
        ]
        inside = [held for held, _ in pairs if held is not None]
        count = sum(bool(is_near) for _, is_near in pairs)
        said.append(f"in {unit} in {sum(inside)} ({count}) of {len(inside)}")
    return ", ".join(said)


if __name__ == "__main__":
    sys.exit(main())
