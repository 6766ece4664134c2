# SPDX-License-Identifier: Apache-2.0
"""KV events over ZMQ: late subscribers, gaps and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from publisher import BLOCK, Publisher, cached, run, stored, subscribed

from fleet.proxy.exact import AllBlocksCleared, BlockRemoved, Exact


def test_who_comes_late_gets_what_was_before(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        for number in range(5):
            await publisher.publish(stored(number))
        await publisher.publish(BlockRemoved([3]))
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: exact.tokens == [4 * BLOCK])
            assert [cached(exact, n) for n in range(5)] == [1, 1, 1, 0, 1]
            await publisher.publish(stored(5))
            await until(lambda: cached(exact, 5))
            assert subscriber.complete
            assert subscriber.gaps == 0

    run(scenario, tmp_path)


def test_a_gap_is_noticed_and_replayed(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: subscriber.complete)  # nothing has happened yet
            await publisher.publish(stored(0))
            await until(lambda: cached(exact, 0))
            await publisher.publish(stored(1), lost=True)
            await publisher.publish(BlockRemoved([0]), lost=True)
            await publisher.publish(stored(2))
            await until(lambda: cached(exact, 2))
            assert cached(exact, 1)
            assert not cached(exact, 0)
            assert (subscriber.gaps, subscriber.complete) == (1, True)

    run(scenario, tmp_path)


def test_a_replay_with_a_hole_is_asked_for_again(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        for number in range(20):
            await publisher.publish(stored(number))
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: exact.tokens == [20 * BLOCK])
            assert subscriber.complete

    run(scenario, tmp_path, hole=7)


def test_what_can_no_longer_be_replayed_empties_the_state(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await publisher.publish(stored(0))
            await until(lambda: cached(exact, 0))
            for number in range(1, 6):
                await publisher.publish(stored(number), lost=True)
            await publisher.publish(stored(6))
            await until(lambda: cached(exact, 6))
            # Who knows what is left of number 0.
            assert [n for n in range(7) if cached(exact, n)] == [4, 5, 6]
            assert not subscriber.complete
            await publisher.publish(AllBlocksCleared())
            await until(lambda: subscriber.complete)
            assert exact.tokens == [0]

    run(scenario, tmp_path, kept=3)


def test_without_a_replay_endpoint_a_gap_empties_the_state(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        await publisher.publish(stored(0), lost=True)
        async with subscribed(exact, publisher.endpoint, None) as (subscriber, until):
            assert not subscriber.complete
            while not exact.tokens[0]:  # until the subscription is there
                await publisher.publish(stored(0))
                await asyncio.sleep(0.02)
            await publisher.publish(stored(1), lost=True)
            await publisher.publish(stored(2))
            await until(lambda: cached(exact, 2))
            assert exact.tokens == [BLOCK]
            assert not subscriber.complete

    run(scenario, tmp_path)


def test_an_instance_that_starts_anew_has_nothing_cached(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            for number in range(3):
                await publisher.publish(stored(number))
            await until(lambda: exact.tokens == [3 * BLOCK])
            publisher.close()
            await asyncio.sleep(0.1)
            again = Publisher(tmp_path)
            try:
                await again.publish(stored(9))
                ((_, payload),) = again._batches
                # Until the subscription has come back: the new one's first message.
                while not cached(exact, 9):
                    await again._pub.send_multipart([b"", bytes(8), payload])
                    await asyncio.sleep(0.05)
                assert exact.tokens == [BLOCK]
                assert subscriber.complete
                # And one that says nothing: what was ejected is asked again.
                subscriber.resync()
                await asyncio.sleep(0.1)
                await until(lambda: exact.tokens == [BLOCK])
            finally:
                again.close()

    run(scenario, tmp_path)


def test_an_unreadable_message_costs_the_state_and_not_the_subscription(
    tmp_path: Path,
) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await publisher.publish(stored(0))
            await until(lambda: cached(exact, 0))
            await publisher.publish_raw(b"\xc1 not msgpack")
            await until(lambda: not subscriber.complete)
            # It stays in what can be replayed: nobody must trip over it again.
            await publisher.publish(stored(1))
            await publisher.publish(stored(2), lost=True)
            await publisher.publish(stored(3))
            await until(lambda: all(cached(exact, number) for number in (1, 2, 3)))
            await publisher.publish(AllBlocksCleared())
            await until(lambda: subscriber.complete)
        async with subscribed(exact, *ends) as (subscriber, until):
            await publisher.publish(stored(4))
            await until(lambda: cached(exact, 4))

    run(scenario, tmp_path)
