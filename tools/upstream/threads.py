# SPDX-License-Identifier: Apache-2.0
"""Dates at which pages looked threads up; old ones are to be looked up again."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from kvtax.paths import REPOSITORY

MOST_DAYS = 60
PAGES = ("patches/upstream/README.md", "docs/answers.md")
LOOKED_UP = re.compile(r"looked up on (20\d\d-\d\d-\d\d)")


def old_threads(text: str, today: datetime.date) -> Iterator[tuple[int, int]]:
    """Yield (line, days) of each date at which threads were looked up too long ago."""
    for number, line in enumerate(text.splitlines(), start=1):
        for date in LOOKED_UP.findall(line):
            days = (today - datetime.date.fromisoformat(date)).days
            if days > MOST_DAYS:
                yield number, days


def warnings(today: datetime.date) -> list[str]:
    """List what is to be looked up again, a line each."""
    return [
        f"{page}:{number}: its threads were looked up {days} days ago; look again"
        for page in PAGES
        for number, days in old_threads((REPOSITORY / page).read_text(), today)
    ]
