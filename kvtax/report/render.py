# SPDX-License-Identifier: Apache-2.0
"""Renderers of a page: `html` (one file, no network), `markdown` and `terminal`."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec

from kvtax.records.warning import RunWarning
from kvtax.report import PALETTE_FILE
from kvtax.report.document import (
    Bars,
    Cell,
    Figure,
    Group,
    Page,
    Section,
    Table,
    TimeLine,
    Verdicts,
    Words,
)
from kvtax.report.markdown import DASH, table

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
UPLOT = HERE / "uplot"
SCRIPTS = ("parts.js", "bars.js", "chart.js", "timeline.js", "page.js")
# Nothing is fetched from anywhere, whatever a name in the data may hold.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:"
)
MARKS = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*")
LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
# A picture, or a link to anything but a page: no text of ours has one.
FOREIGN_LINK = re.compile(r"!\[|\]\((?!https://|[\w./#-]*\))")
# Columns below which lines would be of single words.
NARROWEST = 40
# Places that a line of Markdown names for one kind of warning.
SHOWN_PLACES = 8


def html(page: Page) -> str:
    """Render one HTML file with its data, style and scripts inside."""
    # Inside a script element only "<" can end it; in JSON it may be escaped.
    data = msgspec.json.encode(page).decode().replace("<", "\\u003c")
    style = _text(UPLOT / "uPlot.min.css") + _text(ASSETS / "page.css")
    scripts = [_text(UPLOT / "uPlot.iife.min.js")]
    scripts += [f"const PALETTE = {_text(PALETTE_FILE)};"]
    scripts += [_text(ASSETS / name) for name in SCRIPTS]
    code = "\n".join(f"<script>\n{script}\n</script>" for script in scripts)
    parts = {
        "POLICY": POLICY,
        "TITLE": escape(plain(page.title)),
        "STYLE": style,
        "LICENCE": _text(UPLOT / "LICENSE"),
        "SCRIPTS": code,
        "DATA": data,
    }
    # In one pass, so that names of parts inside the data stay as they are.
    template = _text(ASSETS / "page.html")
    return re.sub("@([A-Z]+)@", lambda name: parts[name[1]], template)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def markdown(page: Page) -> str:
    """Render Markdown. Time lines are left out: they need the HTML page."""
    parts = [f"# {escaped(page.title)}", escaped_lines(page.question)]
    parts += _joined(page.answer)
    heading = None
    for section in page.sections:
        hidden = isinstance(section, Table) and not section.open
        if section.title != heading and not hidden:
            heading = section.title
            parts.append(f"## {escaped(heading)}")
        parts += _section_markdown(section)
    if page.warnings:
        parts += ["## Warnings", "\n".join(warning_list(page.warnings))]
    parts.append(escaped_lines(page.made))
    return "\n\n".join(filter(None, parts)) + "\n"


def _section_markdown(section: Section) -> list[str]:
    match section:
        case Words():
            return _joined(section.paragraphs)
        case Table():
            text = _table_markdown(section)
            if section.open:
                return [escaped(section.note), text]
            summary = f"<details><summary>{escaped(section.title)}</summary>"
            return [summary, escaped(section.note), text, "</details>"]
        case Verdicts():
            return [
                "\n".join(
                    f"- `{escaped(of.name)}`: **{escaped(of.verdict)}**: "
                    f"{escaped(of.words)}"
                    for of in section.verdicts
                )
            ]
        case Figure():
            names = [f"{section.x_label}", *(line.name for line in section.lines)]
            columns: list[Sequence[Cell]] = [section.x]
            columns += [line.y for line in section.lines]
            rows = [list(row) for row in zip(*columns, strict=True)]
            lines = Table(title=section.title, columns=names, rows=rows)
            return [escaped_lines(section.note), _table_markdown(lines)]
        case Bars():
            paragraphs = [p for bar in section.bars for p in bar.paragraphs]
            return [_table_markdown(bar_table(section)), *_joined(paragraphs)]
        case TimeLine():
            return [escaped_lines(section.note), "Shown on the HTML page."]
        case Group():
            return ["Shown on the HTML page."]


def bar_table(section: Bars) -> Table:
    """Tabulate bars: the whole, and the parts that add up to it."""
    rows: list[Sequence[Cell]] = []
    for bar in section.bars:
        whole = sum(value or 0.0 for value in bar.values)
        rows.append([bar.name, whole, *bar.values])
    columns = [section.unit, "step", *section.parts]
    return Table(title=section.title, columns=columns, rows=rows)


def _joined(paragraphs: Iterable[str]) -> list[str]:
    """Join neighbouring list items to one block; other paragraphs stay apart."""
    blocks: list[str] = []
    after_item = False
    for paragraph in map(escaped_lines, paragraphs):
        item = paragraph.lstrip().startswith("- ")
        if item and after_item:
            blocks[-1] += f"\n{paragraph}"
        else:
            blocks.append(paragraph)
        after_item = item
    return blocks


def _table_markdown(section: Table) -> str:
    head = [_cell_markdown(name) for name in section.columns]
    rows = [[_cell_markdown(cell) for cell in row] for row in section.rows]
    return table(head, rows)


def _cell_markdown(cell: Cell) -> str:
    text = cell if isinstance(cell, str) else number(cell)
    return " <br> ".join(map(escaped, text.split("\n"))).replace("|", "\\|")


def escaped_lines(text: str) -> str:
    """Escape a paragraph line by line."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped(text: str) -> str:
    """Escape what Markdown would take for HTML or load, and show control characters."""
    text = visible(text).replace("<", "&lt;")
    return FOREIGN_LINK.sub(lambda signs: "\\".join(signs[0]), text)


def warning_list(warnings: Iterable[RunWarning]) -> Iterator[str]:
    """List the warnings by kind and message in Markdown, with what to do about each."""
    kinds: dict[str, dict[str, list[str]]] = {}
    remedies: dict[str, str] = {}
    for warning in warnings:
        messages = kinds.setdefault(warning.kind, {})
        messages.setdefault(warning.message, []).append(warning.place)
        remedies[warning.kind] = warning.remedy.rstrip(".")
    for kind, messages in kinds.items():
        yield f"- **{kind.replace('_', ' ')}**"
        for message, places in messages.items():
            named = [f"`{escaped(place)}`" for place in places if place]
            more = len(named) - SHOWN_PLACES
            where = ", ".join(named[:SHOWN_PLACES]) + (f", {more} more" * (more > 0))
            text = escaped(message)
            yield f"  - {where}: {text}" if where else f"  - {text}"
        yield f"  - **What to do:** {escaped(remedies[kind])}."


def terminal(page: Page) -> str:
    """Render lines of plain text: answers, open tables, bars and warnings.

    Lines are as wide as the terminal, or as COLUMNS says.
    """
    lines = wrapped([page.title, *page.answer])
    for section in page.sections:
        lines += _section_lines(section)
    lines += warning_lines(page.warnings)
    return "\n".join(lines)


def wrapped(paragraphs: Iterable[str]) -> list[str]:
    """Break paragraphs into lines; a list item is indented."""
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    lines: list[str] = []
    for paragraph in filter(None, map(plain, paragraphs)):
        margin = "  " if paragraph.startswith("- ") else ""
        lines += textwrap.wrap(
            paragraph,
            width,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def warning_lines(warnings: Iterable[RunWarning]) -> list[str]:
    """Render a heading and a line for each warning; nothing without one."""
    shown = [f"{w.place}: {w}" if w.place else str(w) for w in warnings]
    return ["", "Warnings", *wrapped(f"- {visible(s)}" for s in shown)] if shown else []


def _section_lines(section: Section) -> list[str]:
    match section:
        case Words():
            return ["", *wrapped([section.title, *section.paragraphs])]
        case Table() if section.open:
            rows: list[Sequence[Cell]] = [section.columns, *section.rows]
            cells = [
                [plain(c) if isinstance(c, str) else number(c) for c in row]
                for row in rows
            ]
            note = wrapped([f"({section.note})"] if section.note else [])
            return ["", *wrapped([section.title]), *_fitted(cells), *note]
        case Bars():
            lines = _section_lines(bar_table(section))
            for bar in section.bars:
                lines += ["", *wrapped([bar.note or bar.name, *bar.paragraphs])]
            return lines
    return []


def _fitted(rows: list[list[str]]) -> list[str]:
    """Align cells; leave out the last columns that the terminal has no room for.

    Where two are too wide, names in the first are cut.
    """
    shown, lines = len(rows[0]), aligned(rows)
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    while shown > 2 and max(map(len, lines)) > width:
        shown -= 1
        lines = aligned([row[:shown] for row in rows])
    if (over := max(map(len, lines)) - width) > 0:
        most = max(max(len(row[0]) for row in rows) - over, NARROWEST // 2)
        lines = aligned([[_cut(row[0], most), *row[1:shown]] for row in rows])
    left_out = rows[0][shown:]
    note = f"(a wider terminal also shows: {', '.join(left_out)})"
    return [*lines, *wrapped([note])] if left_out else lines


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Align cells in lines, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def plain(text: str) -> str:
    """Remove the marks of links, code and emphasis, and show control characters."""
    return visible(_unmarked(LINK.sub(r"\1", text)).replace("\n", "; "))


def _unmarked(text: str) -> str:
    return MARKS.sub(lambda mark: mark[1] or _unmarked(mark[2]), text)


def visible(text: str) -> str:
    """Show as escapes what a terminal obeys, hides or cannot encode.

    A name in records may be a client's.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def number(value: float | None) -> str:
    """Format with as many digits as are read, as the HTML page does; None is a dash."""
    if value is None:
        return DASH
    whole = float(value).is_integer() or abs(value) >= 1_000
    return f"{value:,.{0 if whole else 1 if abs(value) >= 10 else 2}f}"
