# SPDX-License-Identifier: Apache-2.0
"""The figures that the reference study states, from reference.csv."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

CSV = Path(__file__).with_name("reference.csv")


@functools.cache
def figures(section: str) -> dict[str, float]:
    """Read the study's figures of a section, by name."""
    with CSV.open(newline="") as file:
        return {
            row["figure"]: float(row["value"])
            for row in csv.DictReader(file)
            if row["section"] == section
        }
