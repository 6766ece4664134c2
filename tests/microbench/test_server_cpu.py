# SPDX-License-Identifier: Apache-2.0
"""CPU time of all processes of a server, whether they still live or not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from microbench.server_cpu import read_cpu

BURN = """
import time
def burn(s):
    end = time.thread_time() + s
    while time.thread_time() < end: pass
"""
# Each reads a line of standard input before it goes on, and then says so.
KINDS = {
    "itself": "burn(0.3)",
    "a thread that goes on": (
        "import threading\n"
        "work = lambda: (burn(0.3), print(flush=True), input())\n"
        "threading.Thread(target=work).start()"
    ),
    "a thread that ended": (
        "import threading\n"
        "thread = threading.Thread(target=burn, args=(0.3,)); thread.start()\n"
        "thread.join()"
    ),
    "a child that ended": (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', BURN + 'burn(0.3)'])"
    ),
    "a child that nobody waited for": (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', BURN + 'burn(0.3)'],"
        " stdout=subprocess.PIPE)\nchild.stdout.read()"
    ),
}
# Stands for the supervisor; the server is below it.
SUPERVISOR = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_time_counts_whoever_took_it(kind):
    server = f"BURN = {BURN!r}\nexec(BURN)\nprint(flush=True)\ninput()\n{KINDS[kind]}\n"
    server += "print(flush=True)\ninput()"
    command = [sys.executable, "-c", SUPERVISOR, server]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdin and supervisor.stdout
        supervisor.stdout.readline()
        before = read_cpu(supervisor.pid)
        supervisor.stdin.write("\n")
        supervisor.stdin.flush()
        supervisor.stdout.readline()
        if kind == "a thread that goes on":
            supervisor.stdout.readline()
        after = read_cpu(supervisor.pid)
        supervisor.stdin.write("\n\n")
    spent_s = (after.ns - before.ns) / 1e9
    # A child has an interpreter to start, which is CPU time, too.
    assert 0.29 < spent_s < 1.0
    own_ns = (
        ns - before.threads.get(thread, 0) for thread, ns in after.threads.items()
    )
    if kind == "a thread that goes on":
        assert max(own_ns) / 1e9 > 0.28


def test_a_server_that_is_gone_took_nothing_more():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert read_cpu(ended.pid).threads == {}
