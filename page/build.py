# SPDX-License-Identifier: Apache-2.0
"""Writes a page: one HTML file with its data, its style and its scripts inside."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import msgspec

from page.document import Page

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
UPLOT = HERE / "uplot"
SCRIPTS = ("parts.js", "chart.js", "timeline.js", "flame.js", "page.js")
# Nothing is fetched from anywhere, whatever a name in the data may hold.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:"
)


def build(page: Page) -> str:
    """The whole file as text."""
    # Inside a script element only "<" can end it; in JSON it may be escaped.
    data = msgspec.json.encode(page).decode().replace("<", "\\u003c")
    style = _text(UPLOT / "uPlot.min.css") + _text(ASSETS / "page.css")
    scripts = [_text(UPLOT / "uPlot.iife.min.js")]
    scripts += [_text(ASSETS / name) for name in SCRIPTS]
    code = "\n".join(f"<script>\n{script}\n</script>" for script in scripts)
    parts = {
        "POLICY": POLICY,
        "TITLE": escape(page.title),
        "STYLE": style,
        "LICENCE": _text(UPLOT / "LICENSE"),
        "SCRIPTS": code,
        "DATA": data,
    }
    # In one pass: what stands in the data is not looked at again.
    template = _text(ASSETS / "page.html")
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], template)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
