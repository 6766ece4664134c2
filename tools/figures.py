# SPDX-License-Identifier: Apache-2.0
"""Write the figures of the committed sweep into the pages that quote them.

    python -m tools.figures      rewrites every marked figure

A mark is a pair of comments around a figure:

    <!--sweep plain.schedule_us.p50 ,.0f-->287<!--/-->

It names a config of per_config.json, a value of it by keys with dots between them, and
the value's format as Python writes it (none for text). A value that has an interval is
written as `value [low, high]`. A test compares each mark with per_config.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from kvtax.paths import REPOSITORY

MARK = re.compile(
    r"(<!--sweep (?P<keys>[\w.]+)(?: (?P<format>[^\s>-]+))?-->)[^<]*(<!--/-->)"
)


class FigureError(Exception):
    """A mark names a value that is not there; the message says which."""


def written(page: str, configs: dict[str, Any]) -> str:
    """Return a page with each marked figure as `configs` of per_config.json has it.

    Raises FigureError for a mark whose value does not exist.
    """

    def figure(mark: re.Match[str]) -> str:
        value: Any = configs
        for key in mark["keys"].split("."):
            if not isinstance(value, dict) or key not in value:
                raise FigureError(
                    f"per_config.json has no {mark['keys']!r} for {mark[0]}"
                )
            value = value[key]
        return mark[1] + _text(value, mark["format"] or "") + mark[4]

    return MARK.sub(figure, page)


def _text(value: Any, spec: str) -> str:
    if isinstance(value, dict):
        low, high = value["ci95"]
        return f"{value['value']:{spec}} [{low:{spec}}, {high:{spec}}]"
    return f"{value:{spec}}"


def sweep() -> dict[str, Any]:
    """Read the configs of the committed sweep."""
    return json.loads((REPOSITORY / "per_config.json").read_text())["configs"]


def main() -> int:
    """Rewrite the pages, name those that changed."""
    configs = sweep()
    listed = subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=REPOSITORY,
        check=True,
        text=True,
        capture_output=True,
    )
    for page in (REPOSITORY / name for name in listed.stdout.splitlines()):
        old = page.read_text()
        try:
            new = written(old, configs)
        except FigureError as error:
            print(f"figures: {page}: {error}: correct the mark", file=sys.stderr)
            return 2
        if new != old:
            page.write_text(new)
            print(f"figures: {page.relative_to(REPOSITORY)} rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
