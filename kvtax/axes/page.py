# SPDX-License-Identifier: Apache-2.0
"""The observatory's page, its README."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvtax.axes.matrix import (
    CellName,
    Growing,
    Matrix,
    read_pending,
    read_sources,
)
from kvtax.engine.releases import tested_releases
from kvtax.records.files import write_whole
from kvtax.records.observatory_cell import CellRecord
from kvtax.report import render
from kvtax.report.document import Cell, Page, Table, Words
from kvtax.report.markdown import DASH, TIMES
from kvtax.stats import Estimate
from kvtax.stats.quantiles import median_of_passes
from kvtax.verdict.axes import AXES, growth, whole

ARROW = "\N{RIGHTWARDS ARROW}"
MARK = "\N{DAGGER}"
PAGE, CSV = "README.md", "idle.csv"
# Verdicts of an axis that idle.csv lists.
WORDS = ("grows", "inconclusive")
Cells = dict[CellName, CellRecord]

ANSWER = (
    "A cell is one connector on one release of vLLM: the release's own engine core, "
    "scheduler, block pool, worker and connector in one process, with the null model, "
    "without HTTP. Its axes are moved one at a time. Nothing is transferred: a cell "
    "shows what having a connector costs. A release without a CPU build is measured "
    "from its sources, on the compiled parts of another one (`kvtax axes --vllm "
    "PATH`). [gate.md](../../docs/gate.md) explains the axes and their limits."
)
NEWEST = (
    f"At both ends of each axis: {TIMES} is the whole step over that of an engine with "
    "a no-op connector, which took turns with it. Below it are all calls of the "
    "connector, in µs per step, in bold if they grow; `?` marks an axis that the cell "
    "cannot decide. *No request* is one second of an engine without requests: CPU time "
    "of the connector's threads, processes and steps, and the steps it asks for. "
    "`plain` and `kv_events` have no connector: their µs are `schedule()` and "
    "`update_from_output()`."
)
GROWING = (
    "Work in a connector's step that grows, in µs of that step. A row names the "
    "command that measures it, or says that the source was read."
)
SOURCES = (
    "Sources cost what a build costs: on {release}, steps of the sources differ from "
    "the build's by at most {worst:.1%}, those of a second build by at most {same:.1%} "
    "(`python -m studies.observatory`; medians over the levels of an axis and the "
    "passes). Older compiled parts may differ: the null model calls no kernel."
)
RELEASES = (
    "[idle.csv](idle.csv) has every release: the step over the no-op's with its 95 % "
    "interval, the connector's µs per idle step with eight running requests, the axes "
    "along which it grows, and the host. Compare cells by the ratio; µs of different "
    "days or hosts must not be compared."
)
# Columns of CSV.
CSV_HEAD = "release,connector,step_ratio,low,high,idle_us,grows_with,undecided,host"


def write_page(matrix: Matrix, cells: Cells, folder: Path) -> Path:
    """Write PAGE and CSV into `folder`; return the page's file."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    write_whole(folder / CSV, idle_csv(cells).encode())
    text = render.markdown(summary_page(with_releases_of(matrix, cells), cells))
    write_whole(page, text.encode())
    return page


def with_releases_of(matrix: Matrix, cells: Cells) -> Matrix:
    """Return the matrix with the releases that `cells` are of, unknown ones last."""
    measured = {release for release, _ in cells}
    releases = [release for release in matrix.releases if release in measured]
    releases += sorted(measured.difference(releases))
    return msgspec.structs.replace(matrix, releases=releases)


def summary_page(matrix: Matrix, cells: Cells) -> Page:
    """Build the page: costs that grow, all axes of the newest release, and reasons."""
    sections = [
        _growing(matrix, cells),
        _newest(matrix, cells),
        Words(title="Other releases", paragraphs=[RELEASES, *_sources()]),
        _reasons(matrix, cells),
    ]
    return Page(
        title="The observatory: what connectors cost per step, by release",
        question="",
        answer=[ANSWER],
        warnings=[],
        sections=[section for section in sections if section is not None],
        made=f"{_measured(cells)} Made by `kvtax axes`; do not edit.",
    )


def idle_csv(cells: Cells) -> str:
    """Tabulate the idle cost of every cell, a line each, with the columns CSV_HEAD."""
    lines = [CSV_HEAD]
    for (release, connector), cell in cells.items():
        if not cell.error:
            ratio = next(iter(step_ratios(cell, "cache")), None)
            figures = (ratio.value, *ratio.ci95) if ratio and ratio.ci95 else ()
            us = idle_us(cell)
            fields = [release, connector]
            fields += [f"{figure:.3f}" for figure in figures] or ["", "", ""]
            fields += ["" if us is None else f"{us:.1f}"]
            fields += [" ".join(_axes_with(cell, word)) for word in WORDS]
            lines.append(",".join([*fields, cell.host or ""]))
    return "\n".join(lines) + "\n"


def _name(matrix: Matrix, connector: str) -> str:
    mark = f" {MARK}" if matrix.stand_in_of(connector) else ""
    return f"{_short(connector)}{mark}"


def _short(connector: str) -> str:
    return f"`{connector.removeprefix('observatory/')}`"


def _table(
    title: str, note: str, columns: list[str], rows: list[list[Cell]]
) -> Table | None:
    """Make a table; None without rows."""
    if not rows:
        return None
    return Table(title=title, note=note, columns=columns, rows=rows)


def step_ratios(cell: CellRecord, axis: str) -> list[Estimate]:
    """Compare whole steps at each level of `axis` with the no-op's beside them.

    Empty for a cell that was measured alone.
    """
    own, noop = (
        np.array(times.get(axis, {}).get("step_us", []))
        for times in (cell.means_us, cell.noop_us)
    )
    if not len(noop):
        return []
    return [median_of_passes(of_level) for of_level in (own / noop).T]


def idle_us(cell: CellRecord) -> float | None:
    """Return all calls of the connector per step with an empty cache."""
    idle = growth(cell, "cache", whole(cell))
    return None if idle is None else idle.level_us[0]


def _axes_with(cell: CellRecord, verdict: str) -> list[str]:
    along = {axis: growth(cell, axis, whole(cell)) for axis in AXES}
    return [axis for axis, grown in along.items() if grown and grown.verdict == verdict]


def _newest(matrix: Matrix, cells: Cells) -> Table:
    """Tabulate all axes of the newest release: a row per connector."""
    release = matrix.releases[-1]
    cells = {name: cell for name, cell in cells.items() if name[0] == release}
    axes = [axis for axis in AXES if any(axis in c.means_us for c in cells.values())]
    rows: list[list[Cell]] = []
    for connector in matrix.connectors:
        cell = cells.get((release, connector))
        if cell is not None and not cell.error:
            ends = [_ends(cell, axis) for axis in axes]
            rows.append([_name(matrix, connector), *ends, _without_requests(cell)])
    return Table(
        title=f"Each axis on {release}",
        note=" ".join([NEWEST, *_stand_ins(matrix)]),
        columns=["connector", *axes, "no request"],
        rows=rows,
    )


def _without_requests(cell: CellRecord) -> str:
    if cell.idle is None:
        return DASH
    # Clocks of threads that slept differ by less than nothing.
    cpu_ms = max(cell.idle.cpu_ms_per_s, 0.0)
    return f"{cpu_ms:.1f} ms, {cell.idle.steps_per_s:.0f} steps"


def _ends(cell: CellRecord, axis: str) -> str:
    along = growth(cell, axis, whole(cell))
    if along is None:
        return DASH
    ends = f"{along.level_us[0]:.0f} {ARROW} {along.level_us[-1]:.0f}"
    marked = {"grows": f"**{ends}**", "flat": ends}.get(along.verdict, f"{ends}?")
    ratios = step_ratios(cell, axis)
    if not ratios:
        return marked
    first, last = ratios[0].value, ratios[-1].value
    return f"{TIMES}{first:.2f} {ARROW} {last:.2f}\n{marked}"


def _stand_ins(matrix: Matrix) -> Iterator[str]:
    """Describe the patches that replace a part of a connector."""
    patches = {matrix.stand_in_of(connector) for connector in matrix.connectors}
    for patch in sorted(filter(None, patches)):
        link = f"[`{patch}`](../../patches/README.md#{patch})"
        yield f"{MARK} with {link}: {matrix.stand_ins[patch]}"


def _growing(matrix: Matrix, cells: Cells) -> Table | None:
    title = "What connectors cost, and grow with"
    head = ["connector", "grows with", "size", "measured by", "where", "fix"]
    head += ["known to"]
    rows: list[list[Cell]] = [
        [
            growing.connector,
            growing.grows_with,
            *_size(growing, cells),
            growing.where,
            growing.fix,
            growing.reported,
        ]
        for growing in matrix.growing
    ]
    return _table(title, GROWING, head, rows)


def _size(growing: Growing, cells: Cells) -> tuple[str, str]:
    """Return the cost at a production point, and the command that measures it."""
    if growing.what is not None:
        pending = read_pending()
        commit = pending.provenance["git_commit"][:7]
        for row in pending.rows:
            if (row.what, row.level) == (growing.what, growing.level):
                return f"{row.time:,.0f} at {row.level}", f"measured at {commit}"
        return "not measured", DASH
    if growing.config is None or growing.axis is None:
        return "not measured", "read in the source"
    cell = cells.get((growing.release, growing.config))
    along = growth(cell, growing.axis, growing.time) if cell else None
    if along is None:
        return "not measured", DASH
    units = AXES[growing.axis].units
    ends = f"{along.level_us[0]:,.0f} {ARROW} {along.level_us[-1]:,.0f}"
    at = f"{along.levels[0]:,} {ARROW} {along.levels[-1]:,} {units}"
    release = growing.release
    which = f"--release {release}"
    if release not in tested_releases():
        which = f"--vllm third_party/vllm-{release}"
    command = f"`kvtax axes {which} --connector {growing.config}`"
    return f"{ends} at {at}: {along.markdown}", command


def _sources() -> list[str]:
    """Compare the sources of a release with its build, if that was measured."""
    result = read_sources()
    if result is None:
        return []
    worst = max(abs(row.sources_by_build.value - 1) for row in result.rows)
    same = max(abs(row.build_by_build.value - 1) for row in result.rows)
    return [SOURCES.format(release=result.release, worst=worst, same=same)]


def _reasons(matrix: Matrix, cells: Cells) -> Table | None:
    """Tabulate why a connector has no cell on the newest release."""
    release = matrix.releases[-1]
    rows: list[list[Cell]] = [
        [_short(connector), error.replace("`", "'")[:300]]
        for (of_release, connector), cell in sorted(cells.items())
        if of_release == release and (error := cell.error)
    ]
    rows += [[f"`{name}`", why] for name, why in matrix.reasons.items()]
    note = "vLLM's message and the line that raised it, or why no cell was tried."
    return _table(f"Without a cell on {release}", note, ["connector", "reason"], rows)


def _measured(cells: Cells) -> str:
    """State when and by which commits the cells were measured."""
    if not cells:
        return "No cell was measured."
    dates = sorted(cell.provenance["date_utc"][:10] for cell in cells.values())
    commits = sorted(
        {(cell.provenance["git_commit"] or "?")[:7] for cell in cells.values()}
    )
    walls = sorted(cell.wall_s for cell in cells.values() if not cell.error)
    took = f" A cell took {walls[len(walls) // 2]:.0f} s (median)." if walls else ""
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{len(cells)} cells of {when}, by commit {', '.join(commits)}.{took}"
