# SPDX-License-Identifier: Apache-2.0
"""The lag measurement and the noisy neighbour leave nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvtax.paths import REPOSITORY
from tests.engine.living import eventually, gone

OURS = ("kvtax.fleet.replay", "microbench.driver")
COMMAND = [sys.executable, "-m", "kvtax", "bench", "senders", "--repeats", "1"]
COMMAND += [option for name in OURS for option in ("--only", name)]


def children(pid: int) -> dict[int, str]:
    """Command lines of the processes that `pid` started, by process id."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it has ended since
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
    return {child: line.replace("\0", " ") for child, line in found.items()}


@pytest.mark.slow
def test_every_generator_gets_a_row_for_every_load():
    command = [*COMMAND, "--rates", "20,50", "--seconds", "0.4"]
    run = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    loads = (["20", "16", "8"], ["50", "16", "20"], ["15", "33000", "6"])
    assert [row[1:5] for row in cells] == [
        [name, *load] for load in loads for name in OURS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_measurement(signum):
    run = subprocess.Popen(
        [*COMMAND, "--rates", "20", "--seconds", "3"], cwd=REPOSITORY
    )
    own = " kvtax fleet replay "
    eventually(lambda: any(own in line for line in children(run.pid).values()))
    started = children(run.pid)
    assert any("kvtax.fleet.standin" in line for line in started.values())
    run.send_signal(signum)
    run.wait()
    assert run.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    # A killed measurement cannot stop the generator, which ends by itself.
    eventually(lambda: gone(started))


# The neighbour of `kvtax bench stressor`.

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
