# SPDX-License-Identifier: Apache-2.0
"""The lag measurement prints its table and leaves nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engine.living import eventually, gone

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
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
    eventually(lambda: any(own in line for line in children(run.pid).values()))
    started = children(run.pid)
    assert any("kvtax.fleet.standin" in line for line in started.values())
    run.send_signal(signum)
    run.wait()
    assert run.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    # A killed measurement cannot stop the generator, which ends by itself.
    eventually(lambda: gone(started))
