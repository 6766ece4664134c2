# SPDX-License-Identifier: Apache-2.0
"""Small experiments in virtual time: seconds, two arms."""

from __future__ import annotations

import io
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from kvtax.cli import main
from kvtax.signals import SIGNALS

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


class Ended(NamedTuple):
    """The exit code of a command, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run(config: Path, out: Path, *options: str) -> Ended:
    """Run an experiment in virtual time, in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            code = main(
                ["fleet", str(config), "--virtual", "--out", str(out), *options]
            )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(code, stdout.getvalue(), stderr.getvalue())
