# SPDX-License-Identifier: Apache-2.0
"""A noisy neighbour runs beside a command, which need not know of it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from kvtax.paths import REPOSITORY

STRESSOR = (sys.executable, "-m", "kvtax", "bench", "stressor", "--seed", "1", "--")
# The first thing that a sweep looks at.
SEEN_BY_A_SWEEP = """
import os
from kvtax.engine.machine_lock import supervisors
from kvtax.engine.supervise import descendants
print(sorted(supervisors() & set(descendants(os.getppid()))))
"""


def test_a_sweep_beside_it_is_not_refused_and_its_exit_status_is_passed_on():
    command = [*STRESSOR, sys.executable, "-c", SEEN_BY_A_SWEEP + "raise SystemExit(3)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "[]\n"), done.stderr


@pytest.mark.slow
def test_the_neighbour_takes_cpu_and_goes_with_a_killed_parent():
    parent = psutil.Popen([*STRESSOR, "sleep", "30"], cwd=REPOSITORY)
    try:
        neighbour, command = children(parent)
        until = time.monotonic() + 20
        while sum(neighbour.cpu_times()[:2]) < 0.2:
            assert time.monotonic() < until, "it takes no CPU"
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    command.kill()
    neighbour.wait(timeout=20)


def children(parent: psutil.Popen) -> list[psutil.Process]:
    """The neighbour and the command."""
    until = time.monotonic() + 20
    while len(found := parent.children()) < 2:
        assert time.monotonic() < until, "it started nothing"
        time.sleep(0.05)
    return sorted(found, key=lambda child: child.name() == "sleep")
