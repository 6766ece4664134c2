# SPDX-License-Identifier: Apache-2.0
"""evidence.json: what a sweep measured, hold by hold, before it is judged."""

from __future__ import annotations

import msgspec

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import ConfigEntry, HostEntry, MachineEntry, WindowRecord
from kvtax.records.run import RunRecord


class ConfigEvidence(msgspec.Struct, kw_only=True):
    """Measurements of one config."""

    facts: ConfigEntry
    """Its entry in per_config.json without verdicts and comparisons."""
    holds: dict[str, list[float | None]] = msgspec.field(default_factory=dict)
    """Columns of the table of its holds, a row each: `repeat`, `hold`, `level`, `many`
    (1 with many decoders), `cache_blocks`, `age_s`, `time_s`, `steps` and `long` (those
    that took 1 ms longer than usual), `rest` (the step without scheduler and connector)
    and each metric, in us per step."""
    log_p50: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """Logarithms of the medians at the stated |cache|, by time, of each server."""
    growth_slopes: dict[str, Estimate | None] = msgspec.field(default_factory=dict)
    """Growth by time while |cache| grows under an open load."""
    interrupted_share: float = 0.0
    """Share of its steps that took several times as long as usual."""


class Evidence(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.evidence/1"
):
    """Measurements of a run; `kvtax sweep --report` makes the results from it."""

    run: RunRecord
    """That of run.json."""
    report_git_commit: str | None
    """Commit of the code that read the run's records."""
    window: WindowRecord | None
    """That of per_config.json."""
    configs: dict[str, ConfigEvidence]
    """By config."""
    machine: MachineEntry | None = None
    """That of per_config.json."""
    hosts: dict[str, HostEntry] | None = None
    """That of per_config.json."""
    figures: list[str] = []
    """Names of the figures that were drawn."""
