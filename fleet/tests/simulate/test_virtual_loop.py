# SPDX-License-Identifier: Apache-2.0
"""Virtual time passes only when nothing is left to do, and ties have an order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax_fleet.simulate.virtual_loop import Deadlock, VirtualLoop

WEEK_NS = 7 * 24 * 3600 * 10**9


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def loop() -> VirtualLoop:
    return asyncio.get_running_loop()


@given(st.lists(st.integers(0, WEEK_NS), max_size=30))
def test_who_sleeps_wakes_at_that_very_nanosecond_and_in_order(dues_ns) -> None:
    async def sleep_all() -> list[tuple[int, int]]:
        woken = []

        async def sleep(place: int, due_ns: int) -> None:
            await loop().sleep_until(due_ns)
            woken.append((loop().now_ns(), place))

        async with asyncio.TaskGroup() as group:
            for place, due_ns in enumerate(dues_ns):
                group.create_task(sleep(place, due_ns))
        return woken

    expected = sorted((due_ns, place) for place, due_ns in enumerate(dues_ns))
    assert run(sleep_all()) == expected


def test_a_year_takes_no_time() -> None:
    began_s = time.monotonic()
    run(asyncio.sleep(365 * 24 * 3600))
    assert time.monotonic() - began_s < 10


def test_asyncio_s_own_timeouts_are_virtual() -> None:
    async def give_up() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)
        return loop().now_ns()

    assert run(give_up()) == 60 * 10**9


def test_time_stands_still_while_anybody_works() -> None:
    async def work() -> int:
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop().now_ns()

    assert run(work()) == 0


def test_a_cancelled_sleep_does_not_hold_the_clock() -> None:
    async def cancel() -> int:
        sleeping = asyncio.create_task(loop().sleep_until(WEEK_NS))
        await asyncio.sleep(1)
        sleeping.cancel()
        await asyncio.sleep(1)
        return loop().now_ns()

    assert run(cancel()) == 2 * 10**9


def test_waiting_for_what_cannot_happen_is_an_error() -> None:
    async def wait() -> None:
        await loop().create_future()

    with pytest.raises(Deadlock):
        run(wait())
