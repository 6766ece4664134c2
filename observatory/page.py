# SPDX-License-Identifier: Apache-2.0
"""docs/observatory.md from the cells' records."""

from __future__ import annotations

import msgspec

from lab.records.observatory_cell import CellRecord
from lab.stats.markdown import DASH, table
from observatory.axes import AXES
from observatory.fit import Growth, grows, growth, steepest, whole
from observatory.matrix import Claim, Matrix
from observatory.results import place

ARROW = "\N{RIGHTWARDS ARROW}"
MARK = "\N{DAGGER}"
Cells = dict[tuple[str, str], CellRecord]
Marks = dict[str | None, int]

HEAD = """
# The observatory: what connectors cost per step, by release

<!-- made by make observatory; do not edit -->

Each cell is one connector on one release of vLLM: the release's own engine core,
scheduler, block pool, worker and connector in one process, with the null model, without
HTTP. Its axes are moved one at a time: cached blocks, running requests, the context's
length, arrivals per step, and what an offloader holds. Nothing is transferred: this is
what having a connector costs. [method.md](method.md#the-observatory) says how it is
measured and what it cannot see.
"""
SUMMARY = """
## What it costs idle, and what it grows with

All calls of the connector per step, with eight running requests and an empty cache, in
µs. Below it, the axes along which they grow; `?` marks an axis that the cell cannot
decide. Each cell links to its record. `plain` and `kv_events` have no connector: theirs
is what vLLM's own `schedule()` and `update_from_output()` take.
"""
AXIS = """
## {units}: {first:,} to {last:,}

All calls of the connector per step at both ends of the axis, and the slope in µs per
step and {per}, with its 95 % interval over six to nine passes. *flat* means that the
slope is below {margin:g}. Where it grows, the method that grows most is named.
"""
REASONS = """
## What does not start

What vLLM said, and the line that refused.
"""
CLAIMS = """
## Reports in the wild

What users reported, and what the cell shows. A curve is level: µs per step.
"""

HOSTS = """
## Hosts

The cells are of several hosts, each cell of one. So what it says of growth holds as it
stands. Levels of cells of different hosts must not be compared.
"""


def page(matrix: Matrix, cells: Cells) -> str:
    """The whole text, Markdown."""
    parts = [
        HEAD.strip(),
        _matrix(SUMMARY, matrix, cells, _idle),
        _stand_ins(matrix),
        _hosts(cells),
        *(_along(axis, matrix, cells) for axis in AXES),
        _claims(matrix, cells),
        _reasons(cells),
        _made(cells),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _matrix(head: str, matrix: Matrix, cells: Cells, told) -> str:
    marks = _marks(cells)
    rows = [
        [_name(matrix, one)]
        + [_cell(cells.get((release, one)), told, marks) for release in matrix.releases]
        for one in matrix.connectors
    ]
    return f"{head.strip()}\n\n{table(['connector', *matrix.releases], rows)}"


def _name(matrix: Matrix, connector: str) -> str:
    mark = f" {MARK}" if matrix.stand_in_of(connector) else ""
    return f"`{connector.removeprefix('observatory/')}`{mark}"


def _cell(cell: CellRecord | None, told, marks: Marks) -> str:
    if cell is None:
        return "not measured"
    if cell.error:
        return "[no](#what-does-not-start)"
    mark = f" <br> *host {marks[cell.host]}*" if marks else ""
    return told(cell) + mark


def _marks(cells: Cells) -> Marks:
    """A number for each host; none if there is one."""
    hosts = sorted({one.host for one in cells.values() if not one.error}, key=str)
    return {host: number for number, host in enumerate(hosts, 1) if len(hosts) > 1}


def _hosts(cells: Cells) -> str:
    rows = []
    for host, number in _marks(cells).items():
        own = [one for one in cells.values() if one.host == host and not one.error]
        cpu = own[0].provenance.get("cpu_model")
        name = host or "without `--ray`"
        rows.append([str(number), name, cpu or DASH, str(len(own))])
    head = ["host", "address", "CPU", "cells"]
    return f"{HOSTS.strip()}\n\n{table(head, rows)}" if rows else ""


def _idle(cell: CellRecord) -> str:
    link = f"results/observatory/{cell.release}/{place('', cell.connector).name}"
    idle = growth(cell, "cache", whole(cell))
    if idle is None:
        return DASH
    grown = [_grown(cell, axis) for axis in AXES]
    return " <br> ".join([f"[{idle.level_us[0]:.0f}]({link})", *filter(None, grown)])


def _grown(cell: CellRecord, axis: str) -> str | None:
    found = growth(cell, axis, whole(cell))
    if found is None:
        return None
    growing = grows(AXES[axis], found.slope)
    if growing is None:
        return f"{axis}?"
    order = f" ({found.order})" if found.order == "quadratic" else ""
    return f"**{axis}**{order}" if growing else None


def _along(axis: str, matrix: Matrix, cells: Cells) -> str:
    told = AXES[axis]
    head = AXIS.format(
        units=told.units.capitalize(),
        first=told.levels[0],
        last=told.levels[-1],
        per=told.per_unit,
        margin=told.margin_us,
    )
    without = [one for one in matrix.connectors if _lacks(one, axis, cells)]
    rows = msgspec.structs.replace(
        matrix, connectors=[one for one in matrix.connectors if one not in without]
    )
    return _matrix(head, rows, cells, lambda cell: _slope(cell, axis))


def _lacks(connector: str, axis: str, cells: Cells) -> bool:
    own = [cell for (_, name), cell in cells.items() if name == connector]
    measured = [cell for cell in own if not cell.error]
    return bool(measured) and not any(axis in cell.means_us for cell in measured)


def _slope(cell: CellRecord, axis: str) -> str:
    found = growth(cell, axis, whole(cell))
    if found is None:
        return DASH if axis in cell.levels else "not measured"
    ends = f"{found.level_us[0]:.0f} {ARROW} {found.level_us[-1]:.0f}"
    by = steepest(cell, axis)
    named = f" <br> `{by.removesuffix('_us')}`" if by else ""
    return f"{ends} <br> {_digits(found)} <br> {verdict(axis, found)}{named}"


def _digits(found: Growth) -> str:
    digits = 2 if abs(found.slope.value) < 10 else 0
    return f"{found.slope:+.{digits}f}"


def verdict(axis: str, found: Growth) -> str:
    """Whether it grows, and in which order."""
    growing = grows(AXES[axis], found.slope)
    if not growing:
        return "flat" if growing is False else "cannot tell"
    known = found.order in ("linear", "quadratic")
    return f"**grows**, {found.order if known else 'order not known'}"


def _stand_ins(matrix: Matrix) -> str:
    used = {matrix.stand_in_of(one) for one in matrix.connectors} - {None}
    return "\n".join(
        f"{MARK} with [`{one}`](../patches/{one}/README.md): {matrix.stand_ins[one]}"
        for one in sorted(used)
    )


def _claims(matrix: Matrix, cells: Cells) -> str:
    head = ["report", "claim", "looked at", "curve", "verdict"]
    rows = [_answer(one, cells) for one in matrix.claims]
    return f"{CLAIMS.strip()}\n\n{table(head, rows)}" if rows else ""


def _answer(claim: Claim, cells: Cells) -> list[str]:
    cell = cells.get((claim.release, claim.connector))
    name = claim.connector.removeprefix("observatory/")
    looked_at = f"`{name}`, {claim.release}, {claim.axis}, `{claim.time}`"
    found = cell and growth(cell, claim.axis, claim.time)
    if not found:
        return [claim.where, claim.claim, looked_at, DASH, "not measured"]
    curve = ", ".join(
        f"{level:,}: {us:,.0f}"
        for level, us in zip(found.levels, found.level_us, strict=True)
    )
    told = verdict(claim.axis, found)
    if other := cells.get((claim.release, claim.beside)):
        told = _beside(claim, cell, found, other)
    return [claim.where, claim.claim, looked_at, curve, told]


def _beside(claim: Claim, cell: CellRecord, found: Growth, other: CellRecord) -> str:
    if other.host != cell.host:
        told = verdict(claim.axis, found)
        return f"{told}; `{claim.beside}` is of another host, and not compared"
    plain = growth(other, claim.axis, claim.time)
    return f"{found.slope:+.1f}, and {plain.slope:+.1f} of `{claim.beside}`"


def _reasons(cells: Cells) -> str:
    failed = [one for one in cells.values() if one.error]
    rows = [
        [f"`{one.connector.removeprefix('observatory/')}`", one.release, _reason(one)]
        for one in sorted(failed, key=lambda one: (one.connector, one.release))
    ]
    head = ["connector", "release", "reason"]
    return f"{REASONS.strip()}\n\n{table(head, rows)}" if rows else ""


def _reason(cell: CellRecord) -> str:
    return cell.error.replace("|", "\\|").replace("`", "'")[:300]


def _made(cells: Cells) -> str:
    if not cells:
        return "No cell was measured."
    dates = sorted(one.provenance["date_utc"][:10] for one in cells.values())
    commits = sorted(
        {(one.provenance["git_commit"] or "?")[:7] for one in cells.values()}
    )
    walls = sorted(one.wall_s for one in cells.values() if not one.error)
    took = f" A cell took {walls[len(walls) // 2]:.0f} s (median)." if walls else ""
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{len(cells)} cells of {when}, by commit {', '.join(commits)}.{took}"
