# SPDX-License-Identifier: Apache-2.0
"""What the page is of: configs/observatory.toml."""

from __future__ import annotations

from typing import Literal

import msgspec

from lab.config import read_toml
from lab.paths import CONFIGS
from lab.serving.connector import load_connector

AxisName = Literal["cache", "running", "context", "arrivals", "fragments", "tier"]


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody reported of a `connector`, and where a cell answers it.

    With `beside`, the answer is its slope against that config's.
    """

    where: str
    claim: str
    connector: str
    axis: AxisName
    release: str
    time: str = "connector_us"
    beside: str | None = None


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each of `connectors` on each of `releases`.

    `stand_ins` says, by patch, what a connector that needs it is measured without.
    """

    releases: list[str]
    connectors: list[str]
    stand_ins: dict[str, str] = {}
    claims: list[Claim] = []

    def stand_in_of(self, connector: str) -> str | None:
        """The patch among the connector's that replaces a part of the real thing."""
        patches = load_connector(connector).patches
        return next((one for one in patches if one in self.stand_ins), None)


def read_matrix() -> Matrix:
    """Raises ConfigError."""
    return read_toml(CONFIGS / "observatory.toml", Matrix)
