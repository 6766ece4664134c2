# SPDX-License-Identifier: Apache-2.0
"""Write the figure of each committed result into its study's page.

The page is NAME/README.md with the figure between <!--figure--> and <!--/figure-->, or
README.md with <!--figure NAME-->. A test compares both.
"""

from __future__ import annotations

import gzip
import importlib
import re
from pathlib import Path

import msgspec

from studies.harness import STUDIES

ALL = STUDIES / "README.md"


def pages() -> dict[Path, str]:
    """Return the pages of the studies that show their result, as they should be."""
    texts = {ALL: ALL.read_text()}
    for result in sorted(STUDIES.glob("*/result.json.gz")):
        name = result.parent.name
        page, mark = result.with_name("README.md"), "figure"
        if not page.exists():
            page, mark = ALL, f"figure {name}"
        text = texts.get(page) or page.read_text()
        marked = re.compile(rf"(<!--{mark}-->\n).*?(<!--/{mark}-->)", re.DOTALL)
        if not marked.search(text):
            continue
        module = importlib.import_module(f"studies.{name}.__main__")
        figure = module.figure(
            msgspec.json.decode(gzip.decompress(result.read_bytes()))
        )
        texts[page] = marked.sub(rf"\g<1>\n{figure}\n\n\g<2>", text)
    return texts


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
