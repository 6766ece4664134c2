# SPDX-License-Identifier: Apache-2.0
"""The figures in the READMEs of studies are those of the committed results."""

from __future__ import annotations

from studies.__main__ import pages


def test_each_readme_shows_its_committed_result():
    found = pages()
    stale = [str(page) for page, text in found.items() if page.read_text() != text]
    assert len(found) >= 6
    assert stale == [], "run python -m studies"
