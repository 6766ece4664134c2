# SPDX-License-Identifier: Apache-2.0
"""Write the figure of each committed result into the README of its study.

It stands between <!--figure--> and <!--/figure-->. A test compares both.
"""

from __future__ import annotations

import gzip
import importlib
import re
from pathlib import Path

import msgspec

from studies.harness import STUDIES

MARKED = re.compile(r"(<!--figure-->\n).*?(<!--/figure-->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the pages of the studies that show their result, as they should be."""
    found = {}
    for result in sorted(STUDIES.glob("*/result.json.gz")):
        page = result.with_name("README.md")
        if page.exists() and MARKED.search(text := page.read_text()):
            module = importlib.import_module(f"studies.{result.parent.name}.__main__")
            document = msgspec.json.decode(gzip.decompress(result.read_bytes()))
            figure = module.figure(document)
            found[page] = MARKED.sub(rf"\g<1>\n{figure}\n\n\g<2>", text)
    return found


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
