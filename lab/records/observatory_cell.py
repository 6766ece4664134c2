# SPDX-License-Identifier: Apache-2.0
"""What one connector costs per step on one release of vLLM, along each axis."""

from __future__ import annotations

from typing import Any

import msgspec

# By axis and time, for each pass over the axis, a mean in us for each level.
Passes = dict[str, dict[str, list[list[float]]]]


class CellRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.observatory_cell/1"
):
    """One cell of the observatory: `RELEASE/CONNECTOR.json`."""

    release: str
    """Of vLLM."""
    connector: str
    """A config in `configs/connectors/`, or the name of a user's own connector."""
    provenance: dict[str, Any]
    """As `provenance` in `run.json`."""
    host: str | None = None
    """The address of the host of several that measured it; null without `--ray`."""
    wall_s: float
    """What the cell took, its start included."""
    levels: dict[str, list[int]] = {}
    """By axis, where it was measured."""
    means_us: Passes = {}
    """By axis and time, for each pass over the levels, the mean of a step in us at each
    level. The slowest tenth of the steps is left out."""
    error: str | None = None
    """Why it could not be measured."""
