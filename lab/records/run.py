# SPDX-License-Identifier: Apache-2.0
"""run.json: what was planned, on what machine, with what versions."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.records.roles import Role

PLAN_FILE = "run.json"


class PlanEntry(msgspec.Struct):
    """One trial of the plan."""

    config: str
    """Name of the connector config."""
    repeat: int
    """Counts from 0."""


class HostRecord(msgspec.Struct):
    """What one host of several measured."""

    host: str
    """Its address."""
    repeats: list[int]
    """The rounds that it measured, each of them whole."""
    provenance: dict[str, Any]
    """The host: as `provenance` of run.json, at its first round."""


class RunRecord(msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.run/1"):
    """What a sweep is going to do; written before its first trial."""

    profile: dict[str, Any] = {}
    """The profile as resolved: `name`, `null_model` (bool), `forward_us` (sleep of the
    null model's forward), `configs`, `repeats`, `num_blocks`, `block_size`, `load` and
    the rest of its file."""
    provenance: dict[str, Any] = {}
    """Where and with what the run was made: the table below. Older runs lack some of
    its fields."""
    configs: dict[str, Role] | None = None
    """By config, the `[report]` table of its TOML: what the config is to the report
    (`lab/records/roles.py`). A run from before this field is read with the TOML files
    of today."""
    plan: list[PlanEntry] = []
    """The trials in the order in which they run. A planned trial without a `trial.json`
    counts as failed."""
    hosts: list[HostRecord] | None = None
    """Which host measured what; null if all was measured on the machine of
    `provenance`."""
