# SPDX-License-Identifier: Apache-2.0
"""Run a command beside a neighbour who takes 0 to 100 % of a core in random bursts.

    python -m costs.stressor [--seed N] -- COMMAND...

The neighbour draws how long a burst is (0.5 to 5 s) and which share of a core it takes
(0 to 100 %), both evenly, again and again; the same seed draws the same. It ends with
the command, whose exit status is returned.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time

from lab.paths import REPOSITORY
from lab.serving.supervise import Supervised, exit_on_signals

BURST_S = (0.5, 5.0)
# Short enough that a burst is an even load, long enough to be one for the scheduler.
PERIOD_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m costs.stressor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = [part for part in arguments.command if part != "--"]
    if not command:
        stress(random.Random(arguments.seed))
    exit_on_signals()
    own = [sys.executable, "-m", "costs.stressor", "--seed", str(arguments.seed)]
    runs = REPOSITORY / "runs"
    runs.mkdir(exist_ok=True)
    with Supervised(own, dict(os.environ), runs / "stressor.log"):
        process = subprocess.Popen(command)
        try:
            return process.wait()
        finally:
            # It cleans up by itself.
            process.terminate()
            process.wait()


def stress(draw: random.Random) -> None:
    """Never returns."""
    while True:
        ends_s = time.monotonic() + draw.uniform(*BURST_S)
        share = draw.random()
        while time.monotonic() < ends_s:
            busy_until_s = time.monotonic() + share * PERIOD_S
            while time.monotonic() < busy_until_s:
                pass
            time.sleep((1 - share) * PERIOD_S)


if __name__ == "__main__":
    sys.exit(main())
