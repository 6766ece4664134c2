# SPDX-License-Identifier: Apache-2.0
"""A flame graph can be read by mouse, keyboard and screen reader, and taken away."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path

import jsonschema
import pytest
from axe_playwright_python.sync_playwright import Axe

from kvtax.report import render
from kvtax.report.document import Flame, FlameThread, Page

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# From speedscope 1.25, whose licence is beside it.
SCHEMA = json.loads((HERE / "speedscope" / "file-format-schema.json").read_text())
HOSTILE = "<img src=x onerror='window.harmed = 1'>"
FRAMES = ["step (core.py:1)", "execute (gpu.py:2)", "get_finished (m.py:3)", HOSTILE]
STEP, EXECUTE, GET_FINISHED, LAST = range(4)


def flame(**changes) -> Flame:
    main = FlameThread(
        name="MainThread",
        stacks=[[STEP], [STEP, EXECUTE], [STEP, GET_FINISHED], [STEP, GET_FINISHED, 3]],
        us=[100.0, 700.0, 50.0, 150.0],
    )
    other = FlameThread(name="sender", stacks=[[LAST]], us=[1_000.0])
    fields = {"title": "In the code", "frames": FRAMES, "threads": [main, other]}
    return Flame(**(fields | changes))


@pytest.fixture
def opened(open_page):
    def show(**options):
        page = Page(
            title="t",
            question="q",
            answer=["a"],
            warnings=[],
            sections=[flame()],
            made="by a test",
        )
        return open_page(render.html(page), **options)

    return show


def widths(page) -> dict[str, float]:
    """Share of the whole width of each box, by the start of its title."""
    found = page.evaluate(
        """() => [...document.querySelectorAll(".flame > div")].map((box) =>
            [box.title.split(":")[0], box.getBoundingClientRect().width])"""
    )
    whole = max(width for _, width in found)
    return {name.partition(" ")[0]: width / whole for name, width in found}


def saved(page, button: str) -> bytes:
    with page.expect_download() as found:
        page.get_by_role("button", name=button).click()
    return found.value.path().read_bytes()


def spoken(page) -> str:
    return page.locator("[aria-live=polite]").inner_text()


def test_a_box_is_as_wide_as_its_share_of_the_time(opened):
    shown = widths(opened())
    assert shown["step"] == pytest.approx(1, abs=0.01)
    assert shown["execute"] == pytest.approx(0.7, abs=0.01)
    assert shown["get_finished"] == pytest.approx(0.2, abs=0.01)
    assert shown["<img"] == pytest.approx(0.15, abs=0.01)


def test_a_keyboard_walks_the_calls_enlarges_one_and_comes_back(opened):
    page = opened()
    tree = page.locator(".flame")
    tree.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert spoken(page).startswith("execute (gpu.py:2): 700 µs per step, 70")
    page.keyboard.press("ArrowRight")
    assert spoken(page).startswith("get_finished (m.py:3): 200 µs per step")
    assert "in its own code 50" in spoken(page)
    page.keyboard.press("Enter")
    assert set(widths(page)) == {"get_finished", "<img"}
    page.keyboard.press("Escape")
    assert "execute" in widths(page)


def test_a_click_enlarges_a_call(opened):
    page = opened()
    page.locator('.flame > div[title^="get_finished"]').click()
    assert widths(page)["<img"] == pytest.approx(0.75, abs=0.01)


def test_what_is_looked_for_is_marked_and_summed(opened):
    page = opened()
    page.get_by_label("Find").fill("GET_FIN")
    assert page.locator(".flame > .hit").count() == 1
    assert spoken(page).startswith("200 µs per step")


def test_another_thread_can_be_chosen(opened):
    page = opened()
    page.get_by_role("combobox").select_option("sender")
    assert set(widths(page)) == {"all", "<img"}


def test_names_stay_text(opened):
    page = opened()
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_a_flame_graph(opened, scheme):
    page = opened(color_scheme=scheme)
    page.locator("summary").click()
    found = Axe().run(page).response["violations"]
    bad = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"]) for one in bad] == []


def test_a_phone_shows_all_of_it(opened):
    page = opened(viewport={"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert widths(page)["step"] == pytest.approx(1, abs=0.01)


def test_the_table_that_is_saved_has_a_row_per_function(opened):
    text = saved(opened(), "Save as CSV").decode()
    head, *rows = csv.reader(io.StringIO(text))
    assert head == ["function", "µs per step in it", "of that in its own code"]
    times = {row[0]: (float(row[1]), float(row[2])) for row in rows}
    assert times["get_finished (m.py:3)"] == (200, 50)
    assert times["step (core.py:1)"] == (1_000, 100)


def test_the_picture_that_is_saved_is_as_large_as_the_graph(opened):
    content = saved(opened(), "Save as PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert content[:4] == b"\x89PNG" and width > 500 and height >= 80


def test_speedscope_can_read_what_is_saved_for_it(opened):
    document = json.loads(saved(opened(), "Save for speedscope"))
    jsonschema.validate(document, SCHEMA)
    main, sender = document["profiles"]
    assert main["weights"] == [100, 700, 50, 150]
    assert sum(main["weights"]) == main["endValue"]
    assert [document["shared"]["frames"][at]["name"] for at in main["samples"][3]] == [
        FRAMES[at] for at in (STEP, GET_FINISHED, LAST)
    ]
    assert sender["name"].startswith("sender")
