# SPDX-License-Identifier: Apache-2.0
"""The noisy neighbour of `kvtax bench stressor` leaves nothing running."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from kvtax.paths import REPOSITORY
from tests.engine.living import eventually

STRESSOR = (sys.executable, "-m", "kvtax", "bench", "stressor", "--seed", "1", "--")
# The first thing that a sweep looks at.
SEEN_BY_A_SWEEP = """
import os
from kvtax.proc.machine_lock import supervisors
from kvtax.proc.supervise import descendants
print(sorted(supervisors() & set(descendants(os.getppid()))))
"""


def test_a_sweep_beside_it_is_not_refused_and_its_exit_status_is_passed_on():
    command = [*STRESSOR, sys.executable, "-c", SEEN_BY_A_SWEEP + "raise SystemExit(3)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "[]\n"), done.stderr


@pytest.mark.slow
def test_the_neighbour_takes_cpu_and_goes_with_a_killed_parent():
    parent = psutil.Popen([*STRESSOR, "sleep", "600"], cwd=REPOSITORY)
    try:
        neighbour, command = started_by(parent)
        eventually(lambda: sum(neighbour.cpu_times()[:2]) >= 0.2)
    finally:
        parent.kill()
        parent.wait()
    command.kill()
    neighbour.wait(timeout=120)


def started_by(parent: psutil.Popen) -> list[psutil.Process]:
    """The neighbour and the command."""
    found: list[psutil.Process] = []

    def both_run() -> bool:
        # A command has its name a moment after its process is there.
        found[:] = sorted(parent.children(), key=lambda one: one.name() == "sleep")
        return len(found) == 2 and found[1].name() == "sleep"

    eventually(both_run)
    return found
