# SPDX-License-Identifier: Apache-2.0
"""The observatory's page, its README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvtax.axes.matrix import (
    CellName,
    Claim,
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
from kvtax.verdict.axes import AXES, Growth, growth, whole

ARROW = "\N{RIGHTWARDS ARROW}"
MARK = "\N{DAGGER}"
PAGE = "README.md"
Cells = dict[CellName, CellRecord]

ANSWER = (
    "Each cell is one connector on one release of vLLM: the release's own engine core, "
    "scheduler, block pool, worker and connector in one process, with the null model, "
    "without HTTP. Its axes are moved one at a time: cached blocks, running requests, "
    "the context's length, arrivals per step, and what an offloader holds. Nothing is "
    "transferred: this is what having a connector costs. A release without a CPU "
    "build is measured from its sources, on compiled parts of another one (`kvtax axes "
    "--vllm PATH`); `python -m studies.observatory` compares sources with a build. "
    "[method.md](../../docs/method.md#the-observatory) says how it is measured and "
    "what it cannot see."
)
SUMMARY = (
    f"With eight running requests and an empty cache. {TIMES}: the whole step over "
    "that of an engine with a no-op connector, which took turns with it, and the 95 % "
    "interval over the passes. It may be compared between cells; a cell without it was "
    "measured alone. µs: all calls of the connector per step. Below them, the axes "
    "along which they grow; `?` marks an axis that the cell cannot decide. The records "
    "are a file per release, beside this page. `plain` and `kv_events` have no "
    "connector: theirs is what vLLM's own `schedule()` and `update_from_output()` take."
)
NEWEST = (
    f"At both ends of each axis: {TIMES}, the step over the no-op's; the connector's "
    "µs per step, in bold if they grow. No request: what an engine without requests "
    "does in a second, CPU time of the connector's threads, processes and steps, and "
    "the steps that it asks for."
)
HOSTS = (
    "The cells are of several hosts, each cell of one. So what it says of growth holds "
    "as it stands. Levels of cells of different hosts must not be compared."
)
GROWING = (
    "Work of a connector's step that grows, in µs of that step. What is measured here "
    "names its command; what is not was read in the source."
)
SOURCES = (
    "{release} has a build. Its sources, on the compiled parts of {compiled}, the "
    "build, and the build again were held at the same levels in turn (`python -m "
    "studies.observatory`). Steps of the sources differ from the build's by at most "
    "{worst:.1%}, those of the second build by at most {same:.1%}: medians over the "
    "levels of an axis, and over the passes. It cannot say what older compiled "
    "parts do to a kernel: the null model calls none."
)
CLAIMS = "What users reported, and what the cell shows. A curve is level: µs per step."


def write_page(matrix: Matrix, cells: Cells, folder: Path) -> Path:
    """Write PAGE into `folder`; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
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
    """Build the page: all releases idle, and all axes of the newest one."""
    idle = "What it costs idle, and what it grows with"
    sections = [
        _growing(matrix, cells),
        _idle_table(idle, matrix, cells),
        Words(title=idle, paragraphs=list(_stand_ins(matrix))),
        _hosts(cells),
        _newest(matrix, cells),
        _sources(),
        _claims(matrix, cells),
        _reasons(cells),
    ]
    return Page(
        title="The observatory: what connectors cost per step, by release",
        question="",
        answer=[ANSWER],
        warnings=[],
        sections=[section for section in sections if section is not None],
        made=f"{_measured(cells)} Made by `kvtax axes`; do not edit.",
    )


def _idle_table(title: str, matrix: Matrix, cells: Cells) -> Table:
    """Tabulate idle costs: a row per connector that ever started, releases beside."""
    hosts = _host_numbers(cells)

    def text(cell: CellRecord | None) -> str:
        if cell is None:
            return "not measured"
        if cell.error:
            return "[no](#what-does-not-start)"
        host = f"\nhost {hosts[cell.host]}" if hosts else ""
        return _idle(cell) + host

    rows: list[list[Cell]] = [
        [
            _name(matrix, connector),
            *(text(cells.get((release, connector))) for release in matrix.releases),
        ]
        for connector in matrix.connectors
        if _is_measured(connector, cells)
    ]
    columns = ["connector", *matrix.releases]
    return Table(title=title, note=SUMMARY, columns=columns, rows=rows)


def _name(matrix: Matrix, connector: str) -> str:
    mark = f" {MARK}" if matrix.stand_in_of(connector) else ""
    return f"{_short(connector)}{mark}"


def _short(connector: str) -> str:
    return f"`{connector.removeprefix('observatory/')}`"


def _host_numbers(cells: Cells) -> dict[str | None, int]:
    """Give each host a number; none if there is one host."""
    hosts = sorted({cell.host for cell in cells.values() if not cell.error}, key=str)
    return {host: number for number, host in enumerate(hosts, 1) if len(hosts) > 1}


def _hosts(cells: Cells) -> Table | None:
    rows: list[list[Cell]] = []
    for host, number in _host_numbers(cells).items():
        own = [cell for cell in cells.values() if cell.host == host and not cell.error]
        cpu = own[0].provenance.get("cpu_model")
        rows.append(
            [str(number), host or "without `--ray`", cpu or DASH, str(len(own))]
        )
    return _table("Hosts", HOSTS, ["host", "address", "CPU", "cells"], rows)


def _table(
    title: str, note: str, columns: list[str], rows: list[list[Cell]]
) -> Table | None:
    """Make a table; None without rows."""
    if not rows:
        return None
    return Table(title=title, note=note, columns=columns, rows=rows)


def _idle(cell: CellRecord) -> str:
    us = idle_us(cell)
    if us is None:
        return DASH
    ratios = [f"{TIMES}{ratio:.2f}" for ratio in step_ratios(cell, "cache")[:1]]
    grown = [_grown(cell, axis) for axis in AXES]
    return "\n".join([*ratios, f"{us:.0f} µs", *filter(None, grown)])


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


def axes_of_growth(cell: CellRecord) -> list[str]:
    """List the axes along which the connector's calls grow."""
    along = {axis: growth(cell, axis, whole(cell)) for axis in AXES}
    return [a for a, found in along.items() if found and found.verdict == "grows"]


def _grown(cell: CellRecord, axis: str) -> str | None:
    along = growth(cell, axis, whole(cell))
    if along is None:
        return None
    if along.verdict == "inconclusive":
        return f"{axis}?"
    if along.verdict == "drifts":
        return f"time, along {axis}"
    shape = f" ({along.shape})" if along.shape == "curved" else ""
    return f"**{axis}**{shape}" if along.verdict == "grows" else None


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
        note=NEWEST,
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


def _is_measured(connector: str, cells: Cells) -> bool:
    """Return whether a connector started on any release."""
    return any(
        name == connector and not cell.error for (_, name), cell in cells.items()
    )


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
            one.connector,
            one.grows_with,
            *_size(one, cells),
            one.where,
            one.fix,
            one.reported,
        ]
        for one in matrix.growing
    ]
    return _table(title, GROWING, head, rows)


def _size(growing: Growing, cells: Cells) -> tuple[str, str]:
    """Return the cost at a production point, and the command that measures it."""
    if growing.what is not None:
        for row in read_pending():
            if (row.what, row.level) == (growing.what, growing.level):
                command = f"`python -m studies.pending --only {row.part}`"
                return f"{row.time:,.0f} at {row.level}", command
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


def _sources() -> Table | None:
    """Tabulate the sources of a release beside its build."""
    result = read_sources()
    if result is None:
        return None
    head = ["connector", "axis", "step, sources / build", "step, build / build"]
    head += ["connector, build, µs", "connector, sources, µs"]
    rows: list[list[Cell]] = [
        [
            _short(row.connector),
            row.axis,
            f"{row.sources_by_build:.3f}",
            f"{row.build_by_build:.3f}",
            f"{row.build_us:,.0f}",
            f"{row.sources_us:,.0f}",
        ]
        for row in result.rows
    ]
    worst = max(abs(row.sources_by_build.value - 1) for row in result.rows)
    same = max(abs(row.build_by_build.value - 1) for row in result.rows)
    note = SOURCES.format(
        release=result.release, compiled=result.compiled, worst=worst, same=same
    )
    return _table("Sources and a build", note, head, rows)


def _claims(matrix: Matrix, cells: Cells) -> Table | None:
    head = ["report", "claim", "looked at", "curve", "verdict"]
    rows = [_answer(claim, cells) for claim in matrix.claims]
    return _table("Reports in the wild", CLAIMS, head, rows)


def _answer(claim: Claim, cells: Cells) -> list[Cell]:
    cell = cells.get((claim.release, claim.connector))
    looked_at = (
        f"{_short(claim.connector)}, {claim.release}, {claim.axis}, `{claim.time}`"
    )
    along = growth(cell, claim.axis, claim.time) if cell else None
    if cell is None or along is None:
        return [claim.where, claim.claim, looked_at, DASH, "not measured"]
    curve = ", ".join(
        f"{level:,}: {us:,.0f}"
        for level, us in zip(along.levels, along.level_us, strict=True)
    )
    answer = along.markdown
    beside = claim.beside and cells.get((claim.release, claim.beside))
    if beside:
        answer = _beside(claim, cell, along, beside)
    return [claim.where, claim.claim, looked_at, curve, answer]


def _beside(claim: Claim, cell: CellRecord, along: Growth, other: CellRecord) -> str:
    plain = growth(other, claim.axis, claim.time)
    if other.host == cell.host and plain is not None:
        return f"{along.slope:+.1f}, and {plain.slope:+.1f} of `{claim.beside}`"
    missing = (
        "was not measured" if plain is None else "is of another host, and not compared"
    )
    return f"{along.markdown}; `{claim.beside}` {missing}"


def _reasons(cells: Cells) -> Table | None:
    alike: dict[tuple[str, str], dict[str, str]] = {}
    for (release, connector), cell in sorted(cells.items()):
        if error := cell.error:
            message = re.sub(r" \([^()]+:\d+\)$", "", error)
            alike.setdefault((connector, message), {})[release] = error
    rows: list[list[Cell]] = [
        [
            _short(connector),
            ", ".join(errors),
            list(errors.values())[-1].replace("`", "'")[:300],
        ]
        for (connector, _), errors in sorted(alike.items())
    ]
    note = "What vLLM said, and the line that refused in the last release of each row."
    head = ["connector", "releases", "reason"]
    return _table("What does not start", note, head, rows)


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
