# SPDX-License-Identifier: Apache-2.0
"""The document model of all reports: words, tables, lines, a server over time.

Renderers (render.py) make HTML, Markdown or plain text of it. A text may mark `code`,
**emphasis** and [a link](to), of which all but Markdown show the words alone. A
paragraph that begins with "- " is an item of a list; everything else in it is shown as
it is. A number that was not measured is null.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtax.records.warning import RunWarning

Numbers = list[float | None]
Cell = str | float | None


class Table(msgspec.Struct, tag_field="kind", tag="table", kw_only=True):
    """Rows of texts and numbers, the first column being what a row is about."""

    title: str
    note: str = ""
    columns: list[str]
    rows: Sequence[Sequence[Cell]]
    open: bool = True
    """Whether it is shown at once, or behind its title."""


class Words(msgspec.Struct, tag_field="kind", tag="words", kw_only=True):
    """Paragraphs under a title."""

    title: str
    paragraphs: list[str]


class Line(msgspec.Struct, kw_only=True):
    """One line of a figure; `low` and `high` are the edges of its band."""

    name: str
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    place: int | None = None
    """Place of its colour in the palette (`kvtax.report`); null: as in the list."""
    muted: bool = False
    """Whether it is drawn in grey, as what does not grow."""


class Figure(msgspec.Struct, tag_field="kind", tag="figure", kw_only=True):
    """Lines over one x axis."""

    title: str
    note: str = ""
    x_label: str
    y_label: str
    x: list[float]
    lines: list[Line]


class Verdict(msgspec.Struct, kw_only=True):
    """Verdict on one config, and its reasons."""

    name: str
    verdict: str
    words: str
    """A sentence for people."""
    reasons: Table | None = None
    """How it was reached."""


class Verdicts(msgspec.Struct, tag_field="kind", tag="verdicts", kw_only=True):
    """A verdict for each config."""

    title: str
    verdicts: list[Verdict]


class Gauge(msgspec.Struct, kw_only=True):
    """Gauge of a server over time; `of_requests` have an axis of their own."""

    name: str
    values: Numbers
    of_requests: bool = False


class Requests(msgspec.Struct, kw_only=True):
    """Requests of a time line, a column each; row i of all columns is one request."""

    total: int
    """How many there are; more than rows if the page does not hold all."""
    ids: list[str]
    arrival_s: list[float]
    end_s: list[float]
    columns: dict[str, list[Cell]]


class TimeLine(msgspec.Struct, tag_field="kind", tag="timeline", kw_only=True):
    """A server's steps over time, as means over equal intervals.

    `parts` are stacked: us per step, by name. `slowest_us` is the step of the interval
    that took longest, and `slowest` are its id and its parts: an outlier stays visible
    however many steps an interval holds.
    """

    title: str
    note: str = ""
    t_s: list[float]
    """Where intervals begin, in seconds since the first step of all."""
    steps: list[int]
    parts: dict[str, Numbers]
    slowest_us: Numbers
    slowest_step: list[int | None]
    slowest_parts: dict[str, Numbers]
    gauges: list[Gauge]
    requests: Requests | None = None


class Bar(msgspec.Struct, kw_only=True):
    """Parts of a whole, with a note."""

    name: str
    note: str = ""
    values: Numbers
    """By part, in order of the parts; they add up to the whole."""
    paragraphs: list[str] = []


class Bars(msgspec.Struct, tag_field="kind", tag="bars", kw_only=True):
    """A horizontal bar for each whole, with its parts side by side."""

    title: str
    unit: str
    parts: list[str]
    bars: list[Bar]


class Group(msgspec.Struct, tag_field="kind", tag="group", kw_only=True):
    """Sections behind one title, which is opened by a click."""

    title: str
    sections: list[Section]


Section = Words | Table | Figure | Verdicts | TimeLine | Bars | Group


class Page(msgspec.Struct, kw_only=True):
    """All of a page, in the order in which it is shown."""

    title: str
    question: str
    answer: list[str]
    """Paragraphs."""
    warnings: list[RunWarning]
    sections: list[Section]
    made: str
    """From what, with what."""
