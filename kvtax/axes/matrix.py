# SPDX-License-Identifier: Apache-2.0
"""Connectors, releases and claims that studies/observatory/README.md covers."""

from __future__ import annotations

import msgspec

from kvtax.config import read_toml
from kvtax.engine.connector import load_connector
from kvtax.engine.releases import tested_releases
from kvtax.paths import CONFIGS
from kvtax.verdict.axes import require_axes

# (release, connector) of a cell.
CellName = tuple[str, str]


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Report of a `connector`'s cost, and the cell that answers it.

    With `beside`, the answer is its slope against that config's.
    """

    where: str
    claim: str
    connector: str
    axis: str
    release: str
    time: str = "connector_us"
    beside: str | None = None

    def __post_init__(self) -> None:
        require_axes([self.axis])


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each of `connectors` on each of `releases` (by default, the tested ones).

    `stand_ins` describes, by patch, the part that a connector is measured without.
    """

    connectors: list[str]
    releases: list[str] = []
    stand_ins: dict[str, str] = {}
    claims: list[Claim] = []

    def stand_in_of(self, connector: str) -> str | None:
        """Return the connector's patch that replaces a part of the real thing."""
        patches = load_connector(connector).patches
        return next((patch for patch in patches if patch in self.stand_ins), None)


def read_matrix() -> Matrix:
    """Read configs/observatory.toml. Raises ConfigError."""
    matrix = read_toml(CONFIGS / "observatory.toml", Matrix)
    return msgspec.structs.replace(matrix, releases=tested_releases())
