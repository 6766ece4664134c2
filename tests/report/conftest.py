# SPDX-License-Identifier: Apache-2.0
"""A real browser, headless, that may fetch nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NEEDED = "needs Chromium: apt-get install chromium"
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# Playwright gives up after 30 s, which a busy machine may take; pytest gives up, too.
NEVER_MS = 0
# A loaded page has its elements, so a test waits no longer for what is not there.
ELEMENT_MS = 120_000


# While it is open, its event loop runs in this thread: no test beside may run one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip(NEEDED)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=path, args=OPTIONS, timeout=NEVER_MS
        )
        yield chromium
        chromium.close()


@dataclass
class Opened:
    """A page, and what it printed, failed at and asked for."""

    page: Page
    printed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path):
    """Opens a text as a file from disk; fails the test for any error or request."""
    opened: list[Opened] = []

    def open_text(text: str, **options) -> Page:
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(**options)
        context.set_default_timeout(ELEMENT_MS)
        context.set_default_navigation_timeout(NEVER_MS)
        view = Opened(context.new_page())
        opened.append(view)
        view.page.on("console", lambda message: view.printed.append(message.text))
        view.page.on("pageerror", lambda error: view.printed.append(str(error)))
        view.page.on("request", lambda request: view.asked.append(request.url))
        view.page.goto(path.as_uri())
        return view.page

    yield open_text
    for number, view in enumerate(opened):
        view.page.context.close()
        assert view.printed == []
        own = (tmp_path / f"page{number}.html").as_uri()
        assert [url for url in view.asked if not url.startswith(("blob:", own))] == []
