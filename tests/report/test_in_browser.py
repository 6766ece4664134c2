# SPDX-License-Identifier: Apache-2.0
"""A page opens from a disk with any data, for mouse, keyboard and screen reader."""

from __future__ import annotations

import csv
import io
import random
import struct

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe

from kvtax.records.warning import RunWarning
from kvtax.report import render
from kvtax.report.document import (
    Figure,
    Gauge,
    Line,
    Page,
    Requests,
    Table,
    TimeLine,
    Verdict,
    Verdicts,
)

pytestmark = pytest.mark.slow

HOSTILE = [
    "<script>window.harmed = 1</script>",
    "</script><img src=x onerror='window.harmed = 1'>",
    "<!-- @DATA@ @SCRIPTS@ \\u003c -->",
    "=HYPERLINK(1)",
    "'\"`${1}\u2028\u202e",
]


def time_line(intervals: int = 200, requests: int = 60, seed: int = 2) -> TimeLine:
    chance = random.Random(seed)
    t_s = [i * 0.5 for i in range(intervals)]
    parts = {"model": 2_000.0, "worker.get_finished": 200.0, "other": 30.0}
    stacked = {
        name: [us * chance.uniform(0.9, 1.1) for _ in t_s] for name, us in parts.items()
    }
    arrival_s = [chance.uniform(0, t_s[-1]) for _ in range(requests)]
    return TimeLine(
        title="The server",
        t_s=t_s,
        steps=[chance.randrange(1, 50) for _ in t_s],
        parts=stacked,
        slowest_us=[chance.uniform(2_300, 9_000) for _ in t_s],
        slowest_step=[1_000 + i for i in range(intervals)],
        slowest_parts={"model": [2_100.0] * intervals, "other": [99.0] * intervals},
        gauges=[
            Gauge(name="|cache|, blocks", values=[i * 10.0 for i in range(intervals)]),
            Gauge(name="running", values=[4.0] * intervals, of_requests=True),
        ],
        requests=Requests(
            total=requests,
            ids=[f"r{i}" for i in range(requests)],
            arrival_s=arrival_s,
            end_s=[at + chance.uniform(0.1, 20) for at in arrival_s],
            columns={"connector ms": [chance.uniform(0, 9) for _ in range(requests)]},
        ),
    )


def whole_page(**changes) -> Page:
    page = Page(
        title="What the connector costs",
        question="What does it cost?",
        answer=["It costs something."],
        warnings=[RunWarning("torn_lines", "r0", "a torn line", "Nothing")],
        sections=[
            Verdicts(
                title="Verdicts",
                verdicts=[
                    Verdict(
                        name="noop",
                        verdict="flat",
                        words="does not grow.",
                        reasons=Table(title="why", columns=["a", "b"], rows=[["x", 1]]),
                    ),
                    Verdict(name="walk", verdict="grows", words="grows."),
                ],
            ),
            Figure(
                title="Against |cache|",
                x_label="blocks",
                y_label="µs",
                x=[0.0, 1.0, 2.0],
                lines=[
                    Line(name="a", y=[1, 2, 3], low=[0.5, 1, 2], high=[2, 3, 4]),
                    Line(name="b", y=[3, None, 1]),
                ],
            ),
            time_line(),
            Table(title="Parts", columns=["part", "µs"], rows=[["model", 2_000.5]]),
        ],
        made="Made by a test.",
    )
    return msgspec.structs.replace(page, **changes)


@pytest.fixture(params=["light", "dark"])
def scheme(request) -> str:
    return request.param


def test_it_opens_without_an_error_or_a_request(open_page):
    page = open_page(render.html(whole_page()))
    assert page.locator("h1").inner_text() == "What the connector costs"
    assert page.locator("canvas").count() == 3


def test_axe_finds_no_serious_fault(open_page, scheme):
    shown = whole_page()
    page = open_page(render.html(shown), color_scheme=scheme)
    page.locator("details:not([open]) > summary").first.click()
    violations = Axe().run(page).response["violations"]
    bad = [
        violation
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in bad] == []


def test_a_phone_shows_it_without_scrolling_sideways(open_page):
    page = open_page(render.html(whole_page()), viewport={"width": 375, "height": 700})
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 375
    assert page.locator("canvas").first.bounding_box()["width"] <= 375


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(open_page, text):
    line = time_line(requests=1)
    line.requests.ids[0] = text
    line.parts[text] = line.parts.pop("other")
    table = Table(title=text, note=text, columns=["a", text], rows=[[text, text]])
    page = open_page(
        render.html(
            whole_page(
                title=text,
                question=text,
                answer=[text],
                warnings=[RunWarning(text, text, text, text)],
                sections=[table, line],
            )
        )
    )
    assert page.evaluate("window.harmed") is None
    assert page.title() == text.strip() or "\u2028" in text
    assert page.locator("h1").text_content() == text
    assert page.locator("td").first.text_content() == text
    assert page.get_by_text(text, exact=True).count() > 3
    assert page.locator("img").count() == 0


def direct(line: TimeLine, begin_s: float, end_s: float) -> set[str]:
    requests = line.requests
    return {
        name
        for name, arrived, ended in zip(
            requests.ids, requests.arrival_s, requests.end_s, strict=True
        )
        if arrived <= end_s and ended >= begin_s
    }


# Requests of a window that the page shows; the CSV has all.
MOST_REQUESTS = 10


def shown_requests(page) -> set[str]:
    table = page.get_by_role("region", name="Requests from")
    return set(table.locator("tbody th").all_text_contents())


def test_dragging_gives_the_requests_of_that_window(open_page):
    line = time_line()
    page = open_page(render.html(whole_page(sections=[line])))
    box = page.locator(".u-over").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], middle, steps=5)
    page.mouse.up()
    begin_s, end_s = (float(box.input_value()) for box in page.locator("input").all())
    assert 25 < begin_s < 35 < end_s < 45
    within = direct(line, begin_s, end_s)
    assert 0 < len(within) < 60
    assert shown_requests(page) <= within
    assert len(shown_requests(page)) == min(len(within), MOST_REQUESTS)


def test_typing_a_window_gives_the_same_requests(open_page):
    line = time_line()
    page = open_page(render.html(whole_page(sections=[line])))
    page.get_by_label("From, s").fill("31.25")
    page.get_by_label("to, s").fill("33")
    page.keyboard.press("Tab")
    within = direct(line, 31.25, 33)
    assert shown_requests(page) <= within
    assert len(shown_requests(page)) == min(len(within), MOST_REQUESTS)
    page.get_by_role("button", name="Whole").press("Enter")
    assert len(shown_requests(page)) == MOST_REQUESTS


def test_the_parts_of_a_window_are_the_mean_over_its_steps(open_page):
    line = time_line()
    page = open_page(render.html(whole_page(sections=[line])))
    page.get_by_label("From, s").fill("10")
    page.get_by_label("to, s").fill("12")
    page.keyboard.press("Tab")
    inside = range(20, 24)
    steps = sum(line.steps[i] for i in inside)
    mean = sum(line.parts["model"][i] * line.steps[i] for i in inside) / steps
    table = page.get_by_role("region", name="Parts of a step from 10 to 12 s")
    cell = table.locator("tr", has_text="model").locator("td").text_content()
    assert float(cell.replace(",", "")) == pytest.approx(mean, abs=1)


def test_a_keyboard_reaches_everything_and_reads_the_chart(open_page):
    page = open_page(render.html(whole_page(sections=[time_line()])))
    wanted = {"Save as PNG", "Save as CSV", "As a table", "Whole", "From, s", "to, s"}
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.labels?.[0]?.textContent.trim() || "
                "document.activeElement.textContent.trim()"
            )
        )
    assert wanted <= reached
    chart = page.get_by_role("group", name="What a step takes, by part")
    chart.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    spoken = page.locator("figure [aria-live]").first.text_content()
    assert spoken.startswith("s since the first step 0.50, ")
    assert "model " in spoken
    assert page.locator("[data-step]").get_attribute("data-step") == "1001"


def test_clicking_a_step_shows_its_parts(open_page):
    page = open_page(render.html(whole_page(sections=[time_line()])))
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    step = int(page.locator("[data-step]").get_attribute("data-step"))
    assert abs(step - 1_100) <= 2
    table = page.get_by_role("region", name=f"Step {step}")
    assert table.locator("tbody th").all_text_contents() == ["model", "other"]


def test_a_figure_can_be_saved_as_csv_and_png(open_page):
    line = time_line()
    page = open_page(render.html(whole_page(sections=[line])))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").first.click()
    rows = list(csv.reader(io.StringIO(saved.value.path().read_text())))
    assert rows[0][:4] == ["s", "steps", "model", "worker.get_finished"]
    assert len(rows) == 201
    assert float(rows[5][2]) == pytest.approx(line.parts["model"][4])
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as PNG").first.click()
    content = saved.value.path().read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content[:4] == b"\x89PNG"
    assert width > 500
    assert height > 320


def test_a_saved_cell_runs_nothing_in_a_spreadsheet(open_page):
    table = Table(title="t", columns=["a"], rows=[["=1+1"], ['say "x", y']])
    page = open_page(render.html(whole_page(sections=[table])))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    assert saved.value.path().read_text() == 'a\n\'=1+1\n"say ""x"", y"\n'


def test_a_page_of_any_length_is_shown_at_once_and_answers_at_once(open_page):
    """Its size, and what it costs the browser, do not depend on how many steps it has.

    CPU time, as other processes do not change it.
    """

    def size_and_cpu_s(intervals: int) -> tuple[int, float, float]:
        line = time_line(intervals=intervals, requests=4 * intervals)
        text = render.html(whole_page(sections=[line]))
        page = open_page(text)
        browser = page.context.new_cdp_session(page)
        browser.send("Performance.enable", {"timeDomain": "threadTicks"})

        def cpu_s() -> float:
            metrics = browser.send("Performance.getMetrics")["metrics"]
            return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

        begun_s = cpu_s()
        page.reload()
        page.evaluate("new Promise(requestAnimationFrame)")
        shown_s = cpu_s()
        page.get_by_label("From, s").fill("1")
        page.keyboard.press("Tab")
        page.evaluate("new Promise(requestAnimationFrame)")
        return len(text), shown_s - begun_s, cpu_s() - shown_s

    (_, *few_s), (size, *many_s) = size_and_cpu_s(10), size_and_cpu_s(1_000)
    assert size < 3e6
    for few, many in zip(few_s, many_s, strict=True):
        assert many < 2 * few + 0.1


STACK = """() => {
  const {plot} = charts[0];
  const shown = plot.series.slice(1).map((one, i) => [one.label, one.show,
    plot.data[i + 1][7]]);
  return {shown, top: plot.scales.y.max};
}"""


@pytest.mark.parametrize(
    "hidden",
    [
        {"model", "other"},
        {"other"},
        {"worker.get_finished"},
        {"model", "worker.get_finished"},
        set(),
    ],
)
def test_the_stack_is_true_whatever_is_hidden(hidden, open_page):
    line = time_line()
    page = open_page(render.html(whole_page(sections=[line])))
    for name in hidden ^ {"model", "other"}:  # hidden at first
        page.locator(".u-legend").first.get_by_text(name, exact=True).click()
    stack = page.evaluate(STACK)
    below = 0.0
    tops = {name: us for name, shown, us in stack["shown"] if shown}
    for name in line.parts.keys() - hidden:
        assert name in tops
    for name in (name for name in line.parts if name not in hidden):
        below += line.parts[name][7]
        assert tops[name] == pytest.approx(below)
    slowest = {name: line.slowest_parts.get(name, [0.0] * 200)[7] for name in hidden}
    left = line.slowest_us[7] - sum(slowest.values())
    assert tops["slowest step"] == pytest.approx(left)
    # The axis is no higher than what is shown.
    gone = sum(line.slowest_parts.get(name, [0.0])[0] for name in hidden)
    assert stack["top"] == pytest.approx(max(line.slowest_us) - gone, rel=0.01)
