# SPDX-License-Identifier: Apache-2.0
"""Phones, laptops and wide screens show a page's answer first, and nothing beyond."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import Page

from fleet.tests.analyze.analyze_runs import Truth as Arm
from fleet.tests.analyze.analyze_runs import write_run as write_fleet
from kvtax.cli import main as kvtax_main
from microbench.report import report
from tests.look.conftest import main
from tests.look.made_up_server import Server, served
from tests.microbench.synthetic import Truth, write_run

pytestmark = pytest.mark.slow

# Tables that scroll sideways, and by how many pixels.
WIDE = (
    "[...document.querySelectorAll('.scroll')].filter((one) => "
    "one.scrollWidth > one.clientWidth).map((one) => "
    "[one.ariaLabel, one.scrollWidth - one.clientWidth])"
)
# Opens all sections; true if one was closed.
OPEN_ALL = (
    "[...document.querySelectorAll('details:not([open])')]"
    ".map((one) => { one.open = true; }).length > 0"
)
WIDTHS = [390, 1_366, 1_920]
CONFIGS = {
    "plain": 0.0,
    "noop": 0.0,
    "mooncake_both_hash_sync": 60.0,
    "mooncake_both_block_pool_delta": 0.0,
    "offloading_new_hashes_only_fixed": 8.0,
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("sweep")
    write_run(folder, [Truth(name, slope=slope) for name, slope in CONFIGS.items()])
    report(folder, folder)
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> str:
    """Records of a server whose connector has many methods, one in two at work."""
    made = served(tmp_path_factory.mktemp("look") / "records", 2_500)
    calls = {
        f"MultiConnector[{i}].build_connector_worker_meta": 50.0 * (i % 2)
        for i in range(24)
    }
    for record in (made.steps[-1], made.workers[-1], made.steps[100]):
        for field in ("connector_self_us", "connector_calls"):
            record[field] |= calls
    folder: Path = made.write()
    assert main([str(folder)]) == 0
    return (folder / "look.html").read_text()


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> str:
    """Records of the demo: three servers side by side."""
    out = tmp_path_factory.mktemp("servers") / "demo"
    assert kvtax_main(["demo", "--out", str(out)]) == 0
    return (out / "look.html").read_text()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> str:
    """An experiment with equal arms, one that is slower, and one that is refused."""
    folder = write_fleet(
        tmp_path_factory.mktemp("fleet"),
        [
            Arm("linear"),
            Arm("linear_again", same_as="linear"),
            Arm("cache_aware_with_a_long_name", slower=1.2),
            Arm("load_only", policy="load_only", slower=1.5),
            Arm("round_robin", fails=9),
        ],
    )
    assert kvtax_main(["fleet", "analyze", str(folder)]) == 3
    return (folder / "report.html").read_text()


@pytest.fixture(params=["sweep", "server", "servers", "fleet"])
def text(request) -> str:
    return request.getfixturevalue(request.param)


def at(open_page, text: str, width: int) -> Page:
    height = 844 if width < 500 else 768
    page = open_page(text, viewport={"width": width, "height": height})
    # A section that is opened draws others, and tables are fitted some frames later.
    deadline_s = time.monotonic() + 5
    while page.evaluate(OPEN_ALL) or page.evaluate(WIDE):
        page.wait_for_timeout(300)
        if time.monotonic() > deadline_s:
            break
    return page


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_and_no_table_scrolls_sideways(open_page, text, width):
    page = at(open_page, text, width)
    beyond = page.evaluate(
        "[...document.querySelectorAll('body *')].filter((one) => "
        "!one.closest('.scroll') && one.getBoundingClientRect().right > innerWidth)"
        ".map((one) => one.outerHTML.slice(0, 200))"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width, beyond
    assert page.evaluate(WIDE) == []
    assert "`" not in page.evaluate("document.body.innerText")


def in_first_screen(page: Page, selector: str) -> bool:
    box = page.locator(selector).first.bounding_box()
    height = page.viewport_size["height"]
    width = page.viewport_size["width"]
    return bool(box) and box["y"] < height and box["x"] + box["width"] <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_screen_of_a_sweep_has_the_answer_and_the_picture(
    open_page, sweep, width
):
    height = 844 if width < 500 else 768
    page = open_page(sweep, viewport={"width": width, "height": height})
    assert in_first_screen(page, "#head p:nth-of-type(2)")
    assert in_first_screen(page, "figcaption")
    caption = page.locator("figcaption").first.text_content()
    assert caption.startswith("Scheduler and connector at held levels")
    table = page.get_by_role("region", name="Cost per engine step").locator("table")
    heads = table.locator("thead th").all_text_contents()
    assert heads[:2] == ["config", "verdict"]
    # What grows comes first.
    assert table.locator("td .verdict").all_text_contents() == [
        *("grows", "grows", "flat", "flat", "flat")
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_screen_of_a_fleet_has_the_ranking(open_page, fleet, width):
    height = 844 if width < 500 else 768
    page = open_page(fleet, viewport={"width": width, "height": height})
    assert "has the shortest mean E2E" in page.locator("#head").text_content()
    table = page.locator("table").first
    heads = table.locator("thead th").all_text_contents()
    assert heads[:2] == ["arm", "verdict"]
    assert in_first_screen(page, "tbody tr td strong")
    verdicts = table.locator("tbody td strong").all_text_contents()
    assert verdicts[0] == "best" and verdicts[-1].startswith("higher")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_screen_of_a_server_has_the_answer_and_its_bar(
    open_page, server, width
):
    height = 844 if width < 500 else 768
    page = open_page(server, viewport={"width": width, "height": height})
    assert in_first_screen(page, "#head p")
    assert in_first_screen(page, ".bar")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> str:
    """Sixty-four ranks of a server, of which some behave otherwise, with warnings."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(64):
        made = Server(
            folder / f"dp{rank}", header={"connectors": ["MooncakeConnector"]}
        )
        for _ in range(200):
            made.step(get_finished_us=60.0 * (2 ** (rank % 8) if rank > 50 else 1))
        made.write()
    assert main([str(folder)]) == 0
    return (folder / "look.html").read_text()


def screens(page: Page) -> float:
    return page.evaluate("document.documentElement.scrollHeight / innerHeight")


@pytest.mark.parametrize(("width", "most"), [(390, 4), (1_366, 2), (1_920, 2)])
@pytest.mark.parametrize("kind", ["server", "servers", "ranks"])
def test_a_page_of_any_number_of_servers_is_two_screens(
    open_page, request, kind, width, most
):
    height = 844 if width < 500 else 768
    text = request.getfixturevalue(kind)
    page = open_page(text, viewport={"width": width, "height": height})
    assert screens(page) <= most
    assert in_first_screen(page, ".bar")


def test_bars_add_up_to_the_step_and_the_stock_release_comes_first(open_page, servers):
    page = open_page(servers, viewport={"width": 1_366, "height": 768})
    assert page.locator(".bar-card h3").all_text_contents() == [
        "h100",
        "hash_walk",
        "fixed",
    ]
    for bar in page.locator(".bar").all():
        widths = [part.bounding_box()["width"] for part in bar.locator("span").all()]
        assert sum(widths) == pytest.approx(bar.bounding_box()["width"], abs=1)


def opened(page: Page) -> None:
    for summary in page.locator("details:not([open]) > summary").all():
        summary.click()


def test_a_click_opens_all_tables_and_ten_requests(open_page, server):
    page = open_page(server, viewport={"width": 1_366, "height": 768})
    assert page.locator("canvas").count() == 0
    opened(page)
    page.wait_for_selector("canvas")
    rows = page.get_by_role("region", name="Requests from").first.locator("tbody tr")
    assert rows.count() == 10
