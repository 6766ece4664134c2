# SPDX-License-Identifier: Apache-2.0
"""The kinds of doubt that a sweep can raise, and what to do about each."""

from __future__ import annotations

from typing import Literal

from lab.records.warning import RunWarning

Kind = Literal[
    "trials_failed",
    "one_repeat",
    "few_steps",
    "no_slope",
    "wide_interval",
    "undecided",
    "no_reset_check",
    "no_worker_records",
    "torn_lines",
    "requests_lost",
    "not_reconciled",
    "sent_late",
    "interrupted",
    "empty_cache",
    "short_reach",
    "batch_sizes_apart",
    "uncommitted",
    "no_noise_floor",
    "high_noise_floor",
    "role_twice",
]
_QUIETER = "stop what else runs on the machine, or use one whose cores are not shared"
REMEDIES: dict[Kind, str] = {
    "trials_failed": "Read their server.log and driver.log; a sweep with `--out` and "
    "`--resume` makes only them again.",
    "one_repeat": "Run two repeats or more (`--repeats 2`).",
    "few_steps": "Send more requests while the cache is full (`plateau_requests`).",
    "no_slope": "Let the cache grow for longer: raise `num_blocks`, or lower "
    "`prompt_tokens`.",
    "wide_interval": f"Add repeats, or {_QUIETER}.",
    "undecided": f"Run it with more repeats (`--only`, `--repeats`), or {_QUIETER}.",
    "no_reset_check": "Send more requests after the reset (`after_reset_requests`).",
    "no_worker_records": "Look in server.log for a worker that died: the overhead of "
    "these steps is not known.",
    "torn_lines": "Look in server.log and driver.log for what killed the writer.",
    "requests_lost": "Read the errors in requests.jsonl: the server had less load than "
    "planned.",
    "not_reconciled": "Make the trial again: requests have no outcome, or two.",
    "sent_late": f"Lower the rate of the load (`rate_rps`), or {_QUIETER}.",
    "interrupted": f"{_QUIETER.capitalize()}.",
    "empty_cache": "Check that prefix caching is on and that prompts fill a block.",
    "short_reach": "Look in its requests and in server.log for why it cached less.",
    "batch_sizes_apart": "Compare its levels with care; a lower rate (`rate_rps`) lets "
    "a slow config keep up with the others.",
    "uncommitted": "Commit and run again: nobody can tell what this run measured.",
    "no_noise_floor": "Run the config with the role `baseline` and the one with the "
    "role `twin` too.",
    "high_noise_floor": f"Add repeats, or {_QUIETER}.",
    "role_twice": "Leave the role to one config of the run.",
}


def doubt(kind: Kind, message: str) -> RunWarning:
    """A warning with the remedy of its kind."""
    return RunWarning(kind, message, REMEDIES[kind])
