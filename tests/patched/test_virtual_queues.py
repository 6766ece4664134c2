# SPDX-License-Identifier: Apache-2.0
"""A virtual instance is the queue that queueing theory says it is."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from statistics import mean

import pytest
from virtual_lab import FORWARD_NS, virtual_engine

from fleet.virtual.instance import Asked, VirtualInstance
from fleet.virtual.loop import VirtualLoop
from lab.records.host_times import RequestTimes

PATCHES = ["step_timing_v1", "step_timing_v2"]

REQUESTS = 4_000
BLOCKS = 700


def poisson_ns(utilisation: float) -> list[int]:
    """When requests come that take a forward each."""
    rng, now_ns, found = random.Random(1), 0.0, []
    for _ in range(REQUESTS):
        now_ns += rng.expovariate(utilisation / FORWARD_NS)
        found.append(round(now_ns))
    return found


def answered_ns(model, arrivals_ns: list[int], at_once: int) -> list[int]:
    """When each is answered by an instance that serves so many `at_once`."""
    engine = virtual_engine(model, BLOCKS, False, max_requests=at_once)

    async def serve() -> list[int]:
        loop = asyncio.get_running_loop()
        instance = VirtualInstance(engine, loop, RequestTimes())

        async def one(number: int, due_ns: int) -> int:
            await loop.sleep_until(due_ns)
            prompt = [number // 1_000 + 1, number % 1_000 + 1] * 4
            await instance.ask(Asked(prompt, output_tokens=1)).begin()
            return loop.now_ns()

        return await asyncio.gather(
            *(one(number, due_ns) for number, due_ns in enumerate(arrivals_ns))
        )

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(serve())


def test_one_at_a_time_is_m_d_1(model):
    """Each wait by Lindley's recursion; their mean by Pollaczek and Khinchine."""
    utilisation = 0.7
    arrivals_ns = poisson_ns(utilisation)
    waits_ns = [0]
    for one_ns, next_ns in pairwise(arrivals_ns):
        waits_ns.append(max(0, waits_ns[-1] + FORWARD_NS - (next_ns - one_ns)))
    answered = answered_ns(model, arrivals_ns, at_once=1)
    assert answered == [
        arrival_ns + wait_ns + FORWARD_NS
        for arrival_ns, wait_ns in zip(arrivals_ns, waits_ns, strict=True)
    ]
    theory_ns = utilisation * FORWARD_NS / (2 * (1 - utilisation))
    assert mean(waits_ns) == pytest.approx(theory_ns, rel=0.1)


def test_several_at_a_time_are_served_in_batches(model):
    """Who has come when a forward begins is in it, up to as many as there is room."""
    at_once = 4
    arrivals_ns = poisson_ns(utilisation=0.8 * at_once)
    expected, free_ns = [], 0
    while len(expected) < REQUESTS:
        begins_ns = max(free_ns, arrivals_ns[len(expected)])
        waiting = sum(
            one <= begins_ns for one in arrivals_ns[len(expected) :][:at_once]
        )
        free_ns = begins_ns + FORWARD_NS
        expected += [free_ns] * waiting
    assert answered_ns(model, arrivals_ns, at_once) == expected


def test_little_s_law_holds_for_what_arrivals_see(model):
    """Poisson arrivals see averages over time: the rate times the mean stay."""
    arrivals_ns = poisson_ns(utilisation=0.5)
    answered = answered_ns(model, arrivals_ns, at_once=1)
    seen, gone = [], 0
    for number, arrival_ns in enumerate(arrivals_ns):
        while answered[gone] <= arrival_ns:
            gone += 1
        seen.append(number - gone)
    stays_ns = map(int.__sub__, answered, arrivals_ns)
    rate_per_ns = REQUESTS / arrivals_ns[-1]
    assert mean(seen) == pytest.approx(rate_per_ns * mean(stays_ns), rel=0.05)
