# SPDX-License-Identifier: Apache-2.0
"""Run a command beside a neighbour who takes 0 to 100 % of a core in random bursts.

    python -m benchmarks stressor [--seed N] -- COMMAND...

The neighbour draws how long a burst is (0.5 to 5 s) and which share of a core it takes
(0 to 100 %), both evenly, again and again; the same seed draws the same. It ends with
the command, whose exit status is returned.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import time

from studies.results import BadArguments

BURST_S = (0.5, 5.0)
# Short enough that a burst is an even load, long enough to be one for the scheduler.
PERIOD_S = 0.02


def stress(draw: random.Random, parent: int) -> None:
    """Until the process `parent` is gone, killed or not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == parent:
        ends_s = time.monotonic() + draw.uniform(*BURST_S)
        share = draw.random()
        while time.monotonic() < ends_s:
            busy_until_s = time.monotonic() + share * PERIOD_S
            while time.monotonic() < busy_until_s:
                pass
            time.sleep((1 - share) * PERIOD_S)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks stressor`."""
    parser.add_argument("--seed", type=int, default=0)
    # Not "+", which takes options of the command for ours: argparse drops the first --.
    parser.add_argument("command", nargs=argparse.REMAINDER)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status. Raises BadArguments without one."""
    command = arguments.command
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        raise BadArguments("give a command after --")
    # Not a `Supervised`: a sweep refuses to start beside what another run supervises.
    neighbour = multiprocessing.Process(
        target=stress, args=(random.Random(arguments.seed), os.getpid()), daemon=True
    )
    neighbour.start()
    process = subprocess.Popen(command)
    try:
        return process.wait()
    finally:
        # It cleans up by itself.
        process.terminate()
        process.wait()
    return 0
