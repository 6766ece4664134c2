# SPDX-License-Identifier: Apache-2.0
"""Sessions that move with their KV, and where no KV may go, through a real proxy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from offload_lab import (
    EXTERNAL,
    HEAVY_FROM,
    RUNNING,
    named,
    slow_pair,
    unlike,
    went_to,
)
from proxy_lab import ask, post, proxy, until

from fleet.standin.process import Standin

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started() -> Iterator[list[Standin]]:
    with slow_pair() as pair:
        yield pair


def test_a_session_that_migrates_is_served_where_its_kv_has_come_to(
    two: list[Standin], tmp_path: Path
) -> None:
    """Its KV moves once; the turns after that hit the cache there."""
    every = ("--parameters", "every_turns=2", "grown_tokens=0", "overload=9")
    # Long enough for the proxy to know where it is cached.
    history = unlike(701) * 3
    before = [one.metrics()[EXTERNAL] for one in two]

    def turn(number: int) -> None:
        asked = ask(history + [number] * 16 * number)
        answer = post(on.url, asked, X_Session_Id="s", X_Request_Id=f"s{number}")
        assert answer.status == 200
        on.end(f"s{number}")

    with proxy(tmp_path, named(two), "migrate", *every) as on:
        turn(0)
        turn(1)
        with ThreadPoolExecutor() as go:
            # Another session that begins like it keeps its instance busy.
            go.submit(post, on.url, ask(history + unlike(700) * 2))
            until(lambda: sum(one.metrics()[RUNNING] for one in two) == 1, "idle")
            turn(2)
        turn(3)
        places = [went_to(on, f"s{turn}") for turn in range(4)]
        first = places[0][0]
        (second,) = {"a", "b"} - {first}
        assert places == [(first, None), (first, None), (second, first), (second, None)]
        decision = next(one for one in on.lines("decision") if one["id"] == "s2")
        assert decision["moves_from"] == first
        assert decision["snapshot"]["pinned_turns"] == 2
        assert on.end("s2")["prefill_instance"] == first
        place = "ab".index(second)
        assert two[place].metrics()[EXTERNAL] - before[place] >= 600
        on.idle()


def test_kv_goes_to_no_instance_without_room_for_it(
    two: list[Standin], tmp_path: Path
) -> None:
    small = [msgspec.structs.replace(one, kv_tokens=220) for one in named(two)]
    with proxy(tmp_path, small, "elastic", *HEAVY_FROM) as on:
        answer = post(on.url, ask(unlike(800)), X_Request_Id="h")
        assert answer.status == 200
        assert "X-Kvtax-Prefill" not in answer.headers
        on.end("h")
        decision = next(one for one in on.lines("decision") if one["id"] == "h")
        assert decision["reason"].endswith(
            "has no room for KV to arrive: not offloaded"
        )


def test_a_policy_may_give_a_prefill_more_time_than_the_proxy_does(
    two: list[Standin], tmp_path: Path
) -> None:
    patient = (*HEAVY_FROM, "prefill_timeout_s=9", "--prefill-timeout-s", "0.05")
    with proxy(tmp_path, named(two), "elastic", *patient) as on:
        answer = post(on.url, ask(unlike(900)), X_Request_Id="h")
        assert answer.headers["X-Kvtax-Prefill"]
        assert on.end("h")["fallback"] is None
