# SPDX-License-Identifier: Apache-2.0
"""The lag measurement prints its table and leaves nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OURS = ("kvtax.fleet.replay", "microbench.driver")
COMMAND = [sys.executable, "-m", "kvtax", "bench", "senders", "--repeats", "1"]
COMMAND += [option for name in OURS for option in ("--only", name)]


def children(pid: int) -> dict[int, str]:
    """Command lines of the processes that `pid` started, by process id."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        int(child): Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        for child in pids
    }


def runs(pid: int) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_generator_gets_a_row_for_every_load():
    command = [*COMMAND, "--rates", "20,50", "--seconds", "0.4"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    loads = (["20", "16", "8"], ["50", "16", "20"], ["15", "33000", "6"])
    assert [row[1:5] for row in cells] == [
        [name, *load] for load in loads for name in OURS
    ]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_measurement(signum):
    run = subprocess.Popen([*COMMAND, "--rates", "20", "--seconds", "3"], cwd=ROOT)
    own = " kvtax fleet replay "
    wait_until(lambda: any(own in line for line in children(run.pid).values()))
    started = children(run.pid)
    assert any("kvtax.fleet.standin" in line for line in started.values())
    run.send_signal(signum)
    run.wait()
    assert run.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    # A killed measurement cannot stop the generator, which ends by itself.
    wait_until(lambda: not any(map(runs, started)))
