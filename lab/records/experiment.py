# SPDX-License-Identifier: Apache-2.0
"""experiment.json: what an experiment is going to run."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.records.arm import TraceFacts


class ExperimentRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.experiment/1"
):
    """What an experiment is going to run; written before its first run."""

    experiment: dict[str, Any]
    """The experiment's file as resolved."""
    trace: TraceFacts
    """What all runs replay."""
    plan: list[str]
    """The runs' folders, in the order in which they run."""
    hosts: int | None = None
    """On how many hosts each fleet is; null: on the one where the command is given, not
    by --ray."""
    versions: dict[str, Any]
    """As `provenance` in `run.json`."""
