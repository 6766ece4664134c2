# SPDX-License-Identifier: Apache-2.0
"""One page reads the same as Markdown, as text of a terminal and as HTML."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from matplotlib import colors, image

from kvtax.engine.connector import connector_names, load_connector
from kvtax.records.warning import RunWarning
from kvtax.report import PALETTE, places, png, render
from kvtax.report.document import (
    Bar,
    Bars,
    Figure,
    Line,
    Page,
    Table,
    Verdict,
    Verdicts,
    Words,
)

PAGE = Page(
    title="The title",
    question="What does it cost?",
    answer=["It costs **more**.", "- first", "- second"],
    warnings=[
        RunWarning("torn_lines", "a", "1 torn line", "Look at server.log."),
        RunWarning("torn_lines", "b", "1 torn line", "Look at server.log."),
    ],
    sections=[
        Words(title="First", paragraphs=["A [paragraph](a.md) of `code`."]),
        Table(
            title="First", columns=["arm", "ms"], rows=[["a|b", 1234.5], ["c", None]]
        ),
        Table(title="More", columns=["arm"], rows=[["two\nlines"]], open=False),
        Figure(
            title="F", x_label="x", y_label="y", x=[1], lines=[Line(name="l", y=[2])]
        ),
        Verdicts(title="V", verdicts=[Verdict(name="n", verdict="flat", words="is.")]),
    ],
    made="Made by a test.",
)


def test_code_inside_of_emphasis_shows_no_marks():
    assert render.plain("**Not compared: `a` with `b`**: `**x`") == (
        "Not compared: a with b: **x"
    )


def test_markdown_holds_every_part_of_a_page():
    text = render.markdown(PAGE)
    assert text.startswith(
        "# The title\n\nWhat does it cost?\n\nIt costs **more**.\n\n"
    )
    assert "- first\n- second\n" in text
    assert text.count("## First") == 1
    assert "| arm | ms |\n| --- | ---: |\n| a\\|b | 1,234 |\n| c | \u2013 |" in text
    assert (
        "<details><summary>More</summary>\n\n| arm |\n| --- |\n| two <br> lines |"
        in text
    )
    assert "| x | l |" in text
    assert "- `n`: **flat**: is." in text
    assert "**torn lines**\n  - `a`, `b`: 1 torn line\n  - **What to do:** Look" in text


def test_a_terminal_gets_aligned_tables_without_marks():
    lines = render.terminal(PAGE).splitlines()
    assert lines[:2] == ["The title", "It costs more."]
    assert "A paragraph of code." in lines
    assert "a|b  1,234" in lines
    assert "More" not in lines
    assert "- a: 1 torn line. Look at server.log." in lines


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_of_words_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    page = msgspec.structs.replace(PAGE, answer=["many short words " * 30])
    lines = render.terminal(page).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) > 480 / columns


def test_names_of_a_table_are_cut_where_two_columns_are_too_wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "worker.get_block_ids_with_load_errors"
    rows = [[f"    {name}", 1234.5, 99.0], ["step", 1.0, 2.0]]
    table = Table(title="", columns=["us per step", "mean", "share"], rows=rows)
    lines = render.terminal(msgspec.structs.replace(PAGE, sections=[table]))
    assert max(map(len, lines.splitlines())) <= 40
    assert "    worker.get_block_ids_with_lo" in lines


BARS = Bars(
    title="",
    unit="us",
    parts=["model", "connector"],
    bars=[Bar(name="a|b", values=[3.0, 1.0], paragraphs=["- Remedy."])],
)


def test_bars_are_a_table_whose_parts_add_up():
    page = msgspec.structs.replace(PAGE, sections=[BARS])
    lines = render.terminal(page).splitlines()
    assert ["a|b", "4", "3", "1"] in [line.split() for line in lines]
    assert "- Remedy." in lines
    assert "| a\\|b | 4 | 3 | 1 |" in render.markdown(page)


HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J[a](javascript:b)![p](https://evil/x.png)"


def test_a_hostile_name_is_text_wherever_it_stands():
    words = Words(title=HOSTILE, paragraphs=[HOSTILE, f"- {HOSTILE}"])
    table = Table(title=HOSTILE, note=HOSTILE, columns=[HOSTILE], rows=[[HOSTILE]])
    hidden = msgspec.structs.replace(table, open=False)
    verdict = Verdict(name=HOSTILE, verdict=HOSTILE, words=HOSTILE)
    drawn = Figure(
        title=HOSTILE,
        note=HOSTILE,
        x_label=HOSTILE,
        y_label="",
        x=[1],
        lines=[Line(name=HOSTILE, y=[2])],
    )
    verdicts = Verdicts(title=HOSTILE, verdicts=[verdict])
    page = Page(
        title=HOSTILE,
        question=HOSTILE,
        answer=[HOSTILE],
        warnings=[RunWarning("torn_lines", HOSTILE, HOSTILE, HOSTILE)],
        sections=[words, table, hidden, verdicts, drawn],
        made=HOSTILE,
    )
    text = render.markdown(page)
    assert "<img" not in text and "\x1b" not in text
    assert text.count("onerror") >= 18
    assert "](javascript:" not in text and "![p]" not in text
    assert "\x1b" not in render.terminal(page)


def test_html_holds_the_page_as_data():
    text = render.html(PAGE)
    assert "@DATA@" not in text
    assert '"title":"The title"' in text


# Of the files in the npm package uplot 1.6.32.
UPLOT_SHA256 = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": (
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    ),
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_the_files_of_uplot_are_those_that_its_authors_published():
    shown = {
        name: hashlib.sha256((render.UPLOT / name).read_bytes()).hexdigest()
        for name in UPLOT_SHA256
    }
    assert shown == UPLOT_SHA256


def figure(*places: int | None) -> Figure:
    lines = [
        Line(name=f"line {i}", y=[1.0 + i, 2.0 + i], place=place)
        for i, place in enumerate(places)
    ]
    return Figure(title="t", x_label="x", y_label="y", x=[0.0, 1.0], lines=lines)


def test_fixed_places_are_kept_and_the_others_get_the_lowest_free_ones():
    fixed = {"a": None, "b": 0, "c": None, "d": 5}
    assert places(fixed) == {"a": 1, "b": 0, "c": 2, "d": 5}


def test_no_two_configs_share_a_place():
    fixed = [load_connector(name).report.colour for name in connector_names()]
    taken = [place for place in fixed if place is not None]
    assert len(taken) == len(set(taken))
    assert max(taken) < len(PALETTE.colours) * len(PALETTE.dashes)


@pytest.mark.slow
def test_a_png_has_the_colours_of_the_page(tmp_path):
    drawn = figure(3, 1)
    png.draw(tmp_path / "a.png", drawn)
    pixels = image.imread(tmp_path / "a.png")[..., :3].reshape(-1, 3)
    page = Page(
        title="", question="", answer=[], warnings=[], sections=[drawn], made=""
    )
    text = render.html(page)
    for place in (3, 1):
        colour = PALETTE.colour(place)
        assert (abs(pixels - colors.to_rgb(colour)) < 0.01).all(axis=1).any()
        assert colour in text and f'"place":{place}' in text
    assert not (abs(pixels - colors.to_rgb(PALETTE.colour(0))) < 0.01).all(axis=1).any()


@pytest.mark.slow
def test_lines_of_what_does_not_grow_are_grey_and_share_a_label_where_they_meet(
    tmp_path,
):
    drawn = figure(3, 1, 0, 2)
    for line, y in zip(drawn.lines, (9.0, 1.0, 1.1, 5.0), strict=True):
        line.y, line.muted = [y, y], line is not drawn.lines[0]
    png.draw(tmp_path / "a.png", drawn)
    pixels = image.imread(tmp_path / "a.png")[..., :3].reshape(-1, 3)
    for colour, is_there in (
        (PALETTE.colour(3), True),
        (PALETTE.muted, True),
        *((PALETTE.colour(place), False) for place in (0, 1, 2)),
    ):
        near = (abs(pixels - colors.to_rgb(colour)) < 0.01).all(axis=1)
        assert near.any() == is_there
    ends = [(line.y[-1], 1.0, line) for line in drawn.lines]
    labels = [label.names for label in png._labels(ends, 0.5)]
    assert labels == [["line 2", "line 1"], ["line 3"], ["line 0"]]


@pytest.mark.slow
def test_a_line_with_gaps_is_drawn_to_its_last_value(tmp_path):
    gaps = Figure(
        title="",
        x_label="",
        y_label="",
        x=[0.0, 1.0, 2.0],
        lines=[
            Line(name="a", y=[1.0, None, 3.0], low=[0.5, None, 2], high=[2, None, 4])
        ],
    )
    png.draw(tmp_path / "a.png", gaps)
    assert (tmp_path / "a.png").stat().st_size > 0
