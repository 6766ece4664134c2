# SPDX-License-Identifier: Apache-2.0
"""Another host's times, told by our clock, are wrong by the residual at most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.hosts.clock import Clock, ClockServer, Reading, read_clock
from kvtax.paths import REPOSITORY

S = 10**9
AHEAD_S = 1000
SERVE = """
import sys, time
from kvtax.hosts.clock import ClockServer
print(ClockServer("127.0.0.1").port, flush=True)
for line in sys.stdin:
    print(time.perf_counter_ns(), flush=True)
"""


@st.composite
def drifting(draw):
    """(what the other clock says at a time of ours, our readings of it)."""
    ahead_ns = draw(st.integers(-(10**6), 10**6)) * S
    drift = draw(st.floats(-200e-6, 200e-6))

    def there_ns(ours_ns: int) -> int:
        return ours_ns + ahead_ns + round(drift * ours_ns)

    moments = draw(st.lists(st.integers(0, 600 * S), min_size=2, unique=True))
    readings = []
    for at_ns in sorted(moments):
        round_trip_ns = draw(st.integers(1000, 2_000_000))
        uneven = draw(st.floats(-0.5, 0.5))
        true_ns = there_ns(at_ns) - at_ns
        readings.append(Reading(at_ns, true_ns + uneven * round_trip_ns, round_trip_ns))
    return there_ns, readings


@given(drifting(), st.floats(0, 1))
def test_a_time_of_an_evenly_drifting_clock_is_off_by_no_more_than_the_residual(
    made, share
):
    there_ns, readings = made
    clock = Clock(readings)
    first_ns, last_ns = readings[0].at_ns, readings[-1].at_ns
    ours_ns = first_ns + round(share * (last_ns - first_ns))
    # Of what drifts by 200 us per s, a time that is off by 1 ms is off by 0.2 us.
    bound_ns = clock.residual_us * 1e3 + 1_000
    assert abs(clock.ours_ns(there_ns(ours_ns)) - ours_ns) <= bound_ns
    assert abs(clock.there_ns(ours_ns) - there_ns(ours_ns)) <= bound_ns


def test_a_clock_that_jumps_shows_in_the_residual():
    steady = [Reading(at * S, 5 * S, 1000) for at in range(10)]
    assert Clock(steady).residual_us < 1
    jumped = [*steady[:5], Reading(5 * S, 5 * S + 30_000_000, 1000), *steady[6:]]
    assert Clock(jumped).residual_us > 29_000


def test_our_own_clock_is_not_ahead_of_itself():
    server = ClockServer("127.0.0.1")
    reading = read_clock("127.0.0.1", server.port)
    assert abs(reading.ahead_ns) <= reading.round_trip_ns / 2


def test_a_host_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("kvtax.hosts.clock.TRIES", 1)
    silent = ClockServer("127.0.0.1").port + 1
    with suppress(ConnectionRefusedError), pytest.raises(TimeoutError):
        read_clock("127.0.0.1", silent)


@pytest.mark.skipif(os.geteuid() != 0, reason="a time of its own needs root")
def test_the_clock_of_a_host_that_was_started_at_another_time():
    command = ["unshare", "--time", f"--monotonic={AHEAD_S}", sys.executable]
    with subprocess.Popen(
        [*command, "-c", SERVE],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        port = int(other.stdout.readline())
        readings = [read_clock("127.0.0.1", port)]
        before_ns = time.perf_counter_ns()
        print(file=other.stdin, flush=True)
        there_ns = json.loads(other.stdout.readline())
        after_ns = time.perf_counter_ns()
        readings.append(read_clock("127.0.0.1", port))
        other.stdin.close()
    clock = Clock(readings)
    assert abs(clock.ahead_us / 1e6 - AHEAD_S) < 0.1
    residual_ns = clock.residual_us * 1e3
    assert before_ns - residual_ns <= clock.ours_ns(there_ns) <= after_ns + residual_ns
