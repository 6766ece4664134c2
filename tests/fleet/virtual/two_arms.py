# SPDX-License-Identifier: Apache-2.0
"""A small experiment in virtual time: seconds, two arms."""

from __future__ import annotations

TEXT = """
summary = "two instances, in virtual time"
profile = "h20-30b-a3b"
instances = 2
concurrency = {concurrency}
repeats = {repeats}
baseline = "linear"

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.gz"
sessions = 8
max_turns = 3
max_output_tokens = 40

[arms.linear]
policy = "linear"

[arms.round_robin]
policy = "round_robin"
"""


def two_arms(concurrency: list[int], repeats: int) -> str:
    """The experiment's file; it makes `repeats` runs of each arm and concurrency."""
    return TEXT.format(concurrency=concurrency, repeats=repeats)
