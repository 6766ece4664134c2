# SPDX-License-Identifier: Apache-2.0
"""A report in Markdown and its page say the same."""

from __future__ import annotations

import base64

import pytest

from lab.paths import REPOSITORY
from page.build import build
from page.document import Picture, Table, Words
from page.markdown import page_of

TEXT = """# The title

- **What** was found, in `x`.

## First

Words before
the table.

| arm | p50 [ms](a.csv) |
| --- | ---: |
| `linear@2` | 1.5 <br> **higher** |
| `a|b`   |  |

<details><summary>More of it</summary>

| a |
| --- |
| 1 |

</details>

Words after.

## Second

![A figure](figures/f.png)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "f.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_each_part_of_a_report_is_a_part_of_the_page(folder):
    page = page_of(TEXT.replace("`a|b`", "`ab`"), folder, "here")
    assert page.title == "The title"
    assert page.answer == ["What was found, in x."]
    first, more, after, figure = page.sections
    assert first == Table(
        title="First",
        note="Words before the table.",
        columns=["arm", "p50 ms"],
        rows=[["linear@2", "1.5; higher"], ["ab", ""]],
    )
    assert isinstance(more, Table)
    assert (more.title, more.open, more.rows) == ("More of it", False, [["1"]])
    assert after == Words(title="First", paragraphs=["Words after."])
    png = base64.b64encode(b"\x89PNG").decode()
    assert figure == Picture(title="A figure", png=png)


REPORTS = sorted((REPOSITORY / "docs" / "results").glob("fleet-*/report.md"))


@pytest.mark.parametrize("report", REPORTS, ids=[path.parent.name for path in REPORTS])
def test_every_cell_and_picture_of_a_committed_report_is_on_its_page(report):
    text = report.read_text()
    page = page_of(text, report.parent, "here")
    tables = [one for one in page.sections if isinstance(one, Table)]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert sum(2 + len(table.rows) for table in tables) == len(lines)
    pictures = [one for one in page.sections if isinstance(one, Picture)]
    assert len(pictures) == text.count("![") > 0
    assert len(build(page)) < 3e6


@pytest.mark.slow
def test_such_a_page_opens_without_an_error(open_page):
    page = open_page(build(page_of(REPORTS[0].read_text(), REPORTS[0].parent, "here")))
    assert page.locator("h1").inner_text() == "Fleet: concurrency"
    assert page.locator("img").first.evaluate("one => one.naturalWidth") > 100
