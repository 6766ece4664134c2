# SPDX-License-Identifier: Apache-2.0
"""Reports: one document model, rendered as HTML, Markdown, terminal text or PNG.

Make a `document.Page`, then `render.html(page)`, `render.markdown(page)` or
`render.terminal(page)`; `png.draw(path, figure)` for a figure alone.

The colours of all figures are those of Okabe and Ito (2008), which colour-blind people
can tell apart; black and yellow are left out, as neither shows on both a light and a
dark page. A config has one place in the palette: one colour and dash in every picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path

import msgspec


class Palette(msgspec.Struct, frozen=True):
    """Colours, each first as a whole line, then with each kind of dash."""

    colours: list[str]
    muted: str
    dashes: list[list[int]]
    """Lengths of dash and gap in pixels; empty: a whole line."""

    def colour(self, place: int) -> str:
        """Return the colour at a place, which may be beyond the palette."""
        return self.colours[place % len(self.colours)]

    def dash(self, place: int) -> list[int]:
        """Return the dash at a place."""
        return self.dashes[place // len(self.colours) % len(self.dashes)]


PALETTE_FILE = Path(__file__).parent / "assets" / "palette.json"
PALETTE = msgspec.json.decode(PALETTE_FILE.read_bytes(), type=Palette)


def places(fixed: Mapping[str, int | None]) -> dict[str, int]:
    """Give each name its fixed place, or the lowest one that no other has."""
    taken = {place for place in fixed.values() if place is not None}
    free = (place for place in count() if place not in taken)
    return {
        name: next(free) if place is None else place for name, place in fixed.items()
    }
