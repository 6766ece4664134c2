# SPDX-License-Identifier: Apache-2.0
"""Kinds of warnings of a sweep, each with its remedy."""

from __future__ import annotations

from typing import Literal

from kvtax.records.warning import RunWarning

Kind = Literal[
    "trials_failed",
    "few_steps",
    "no_slope",
    "undecided",
    "no_worker_records",
    "torn_lines",
    "requests_lost",
    "not_reconciled",
    "sent_late",
    "interrupted",
    "uncommitted",
    "no_noise_floor",
    "high_noise_floor",
    "role_twice",
]
_QUIETER = "stop what else runs on the machine, or use one whose cores are not shared"
REMEDIES: dict[Kind, str] = {
    "trials_failed": "Read their server.log and driver.log; a sweep with `--out` and "
    "`--resume` makes only them again.",
    "few_steps": "Hold the levels for longer (`output_tokens` of the ladder).",
    "no_slope": "Add passes to the ladder.",
    "undecided": f"Run it with more repeats (`--only`, `--repeats`), or {_QUIETER}.",
    "no_worker_records": "Look in server.log for a worker that died: the overhead of "
    "these steps is not known.",
    "torn_lines": "Look in server.log and driver.log for what killed the writer.",
    "requests_lost": "Read the errors in requests.jsonl: the server had less load than "
    "planned.",
    "not_reconciled": "Make the trial again: requests have no outcome, or two.",
    "sent_late": "Growth and latencies of that trial are left out, not its levels. "
    f"Lower the rate of the load (`rate_rps`), or {_QUIETER}.",
    "interrupted": f"{_QUIETER.capitalize()}.",
    "uncommitted": "Commit and run again: the measured code is not on record.",
    "no_noise_floor": "Run the config with the role `baseline` and the one with the "
    "role `twin` too.",
    "high_noise_floor": f"Add repeats, or {_QUIETER}.",
    "role_twice": "Leave the role to one config of the run.",
}


def doubt(kind: Kind, message: str) -> RunWarning:
    """Make a warning with the remedy of its kind."""
    return RunWarning(kind, "", message, REMEDIES[kind])
