# SPDX-License-Identifier: Apache-2.0
"""A config has one colour and dash in every picture, in HTML and in PNG."""

from __future__ import annotations

from matplotlib import colors, image

from kvtax.engine.connector import connector_names, load_connector
from kvtax.report import png, render
from kvtax.report.document import Figure, Line, Page
from kvtax.report.palette import PALETTE, places


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


def test_a_png_has_the_colours_of_the_page(tmp_path):
    drawn = figure(3, 1)
    png.draw(drawn, tmp_path / "a.png")
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
    png.draw(gaps, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
