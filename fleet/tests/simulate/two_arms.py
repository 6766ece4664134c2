# SPDX-License-Identifier: Apache-2.0
"""Small experiments in virtual time: seconds, two arms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtax.paths import REPOSITORY

DEADLINE_S = 300

TEXT = """
summary = "two instances, in virtual time"
profile = "h20-30b-a3b"
instances = 2
concurrency = {concurrency}
repeats = {repeats}
baseline = "linear"

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
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


def run(config: Path, out: Path, *options: str) -> subprocess.CompletedProcess:
    """Run an experiment in virtual time."""
    module = [sys.executable, "-m", "kvtax", "fleet", str(config), "--virtual"]
    return subprocess.run(
        [*module, "--out", str(out), *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
