# SPDX-License-Identifier: Apache-2.0
"""The figures that the reference study states, from reference.csv."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

CSV = Path(__file__).with_name("reference.csv")


def figures(section: str) -> dict[str, float]:
    """Read the study's figures of a section, by name."""
    return {row["figure"]: float(row["value"]) for row in rows(section)}


def withdrawn(section: str) -> dict[str, str]:
    """Read why the study's authors withdrew figures of a section, by name."""
    return {row["figure"]: row["withdrawn"] for row in rows(section)}


@functools.cache
def rows(section: str) -> list[dict[str, str]]:
    """Read the rows of a section."""
    with CSV.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["section"] == section]
