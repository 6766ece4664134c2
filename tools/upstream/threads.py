# SPDX-License-Identifier: Apache-2.0
"""Dates at which pages looked threads up; old ones are to be looked up again."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from kvtax.paths import REPOSITORY

MOST_DAYS = 60
PAGES = ("patches/upstream/descriptions.md", "docs/answers.md")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def old_threads(text: str, today: datetime.date) -> Iterator[tuple[int, int]]:
    """Yield (line, days) of each line whose newest date is too old.

    A row of a table, or the line that dates a page, is a look at a thread.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        dates = DATE.findall(line)
        if not dates or not (line.startswith("|") or "<!--threads-->" in line):
            continue
        days = (today - datetime.date.fromisoformat(max(dates))).days
        if days > MOST_DAYS:
            yield number, days


def warnings(today: datetime.date) -> list[str]:
    """List what is to be looked up again, a line each."""
    return [
        f"{page}:{number}: its threads were looked up {days} days ago; look again"
        for page in PAGES
        for number, days in old_threads((REPOSITORY / page).read_text(), today)
    ]
