# SPDX-License-Identifier: Apache-2.0
"""docs/observatory.md from the cells' records."""

from __future__ import annotations

from lab.records.documents import read_document
from lab.stats.markdown import table
from observatory.axes import AXES
from observatory.fit import Growth, growth
from observatory.record import CellRecord, place

TIME = "connector_us"
GROWS = {True: "**grows**", False: "flat", None: "?"}


def page(releases: list[str], connectors: list[str]) -> str:
    """The whole text, Markdown."""
    sections = [_axis(axis, releases, connectors) for axis in AXES]
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


HEAD = """
# The observatory: what connectors cost per step, by release

`make observatory` measures it: one engine core in one process, the null model, no HTTP.
A cell is what all calls of the connector take per step at the lowest and at the highest
level of the axis, and how it moves between: the slope with its 95 % interval, over six
passes.
"""


def _axis(axis: str, releases: list[str], connectors: list[str]) -> str:
    told = AXES[axis]
    per = f"{told.per:,} {told.unit}" if told.per > 1 else told.unit
    head = ["connector", *releases]
    rows = [
        [f"`{connector}`", *(_cell(axis, one, connector) for one in releases)]
        for connector in connectors
    ]
    title = f"## {told.unit.capitalize()}: {told.levels[0]:,} to {told.levels[-1]:,}"
    return f"{title}\n\nSlopes in µs per step and {per}.\n\n{table(head, rows)}"


def _cell(axis: str, release: str, connector: str) -> str:
    file = place(release, connector)
    if not file.exists():
        return "not measured"
    record = read_document(file, CellRecord)
    if record.error:
        return f"[no]({_link(release, connector)})"
    passes = record.medians_us[axis].get(TIME)
    if passes is None:
        return "-"
    return _told(axis, growth(AXES[axis], passes))


def _told(axis: str, found: Growth) -> str:
    verdict = GROWS[found.grows(AXES[axis])]
    if found.order in ("linear", "quadratic"):
        verdict += f", {found.order}"
    low, high = found.slope.ci95
    return (
        f"{found.first_us:.1f} → {found.last_us:.1f} µs, "
        f"{found.slope.value:+.2f} [{low:+.2f}, {high:+.2f}], {verdict}"
    )


def _link(release: str, connector: str) -> str:
    return f"results/observatory/{release}/{place(release, connector).name}"
