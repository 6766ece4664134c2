# SPDX-License-Identifier: Apache-2.0
"""Of every offload it is known how long its phases took, or why it came to nothing;
and a pair of instances between which no KV arrives is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from offload_lab import HEAVY_FROM, named, slow_pair, unlike
from proxy_lab import ask, post, proxy

from fleet.proxy.offload_account import OffloadAccount
from fleet.proxy.rests import FIRST_S, LONGEST_S, Rests
from fleet.standin.process import Standin
from lab.records.decisions import Offload

S = 1_000_000_000


class Clock:
    now_s = 100.0

    def __call__(self) -> int:
        return int(self.now_s * S)


def test_a_pair_rests_longer_each_time_until_kv_arrives() -> None:
    clock = Clock()
    rests = Rests(clock)
    lengths = []
    for _ in range(8):
        assert rests.left_s("p", "d") == 0
        rests.failed("p", "d")
        lengths.append(rests.left_s("p", "d"))
        clock.now_s += lengths[-1]
    assert lengths == [10, 20, 40, 80, 160, 320, 320, 320]
    assert (FIRST_S, LONGEST_S) == (10, 320)
    rests.worked("p", "d")
    rests.failed("p", "d")
    assert rests.left_s("p", "d") == 10


def test_only_that_pair_rests_and_failures_that_come_together_count_once() -> None:
    clock = Clock()
    rests = Rests(clock)
    for _ in range(3):
        rests.failed("p", "d")
    assert rests.left_s("p", "d") == 10
    assert rests.left_s("p", "e") == rests.left_s("d", "p") == 0


def test_phases_are_what_lies_between_the_moments() -> None:
    offload = Offload("p", 1 * S, 2 * S, 5 * S, 5 * S, 9 * S)
    assert offload.phases_s() == {
        "before_prefill": 1,
        "prefill": 3,
        "handover": 4,
        "total": 8,
    }
    # D's first token can be here before P's own answer is.
    assert Offload("p", 1 * S, 1 * S, 7 * S, 1 * S, 6 * S).phases_s()["handover"] == 0
    assert Offload("p", 1 * S, ended_ns=2 * S).phases_s() == {"total": 1}


def test_the_account_has_counts_by_outcome_and_times_of_those_used() -> None:
    account = OffloadAccount()
    account.add(Offload("p", 0, 0, 3 * S, 3 * S, 4 * S))
    account.add(Offload("p", 0, 0, ended_ns=60 * S, failure="prefill_slow"))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for metric in account.collect()
        for sample in metric.samples
    }
    assert samples["kvtax_proxy_offloads_ended_total", "p", "used"] == 1
    assert samples["kvtax_proxy_offloads_ended_total", "p", "prefill_slow"] == 1
    assert samples["kvtax_proxy_offload_seconds_sum", "prefill"] == 3
    assert samples["kvtax_proxy_offload_seconds_sum", "handover"] == 1
    assert samples["kvtax_proxy_offload_seconds_count", "total"] == 1


@pytest.fixture(scope="module")
def started() -> Iterator[list[Standin]]:
    with slow_pair() as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
def test_the_end_line_has_the_moments_of_an_offload_in_their_order(
    two: list[Standin], tmp_path: Path, connector: str
) -> None:
    with proxy(tmp_path, named(two, connector), "elastic", *HEAVY_FROM) as on:
        post(on.url, ask(unlike(len(connector))), X_Request_Id="h")
        end = on.end("h")
        told = end["offload"]
        assert "failure" not in told
        moments = [told[f"{name}_ns"] for name in ("begun", "prefill_asked")]
        asked = ["prefilled", "decode_asked"]
        # Over Mooncake both are asked at once.
        for name in asked if connector == "nixl" else asked[::-1]:
            moments.append(told[f"{name}_ns"])
        moments += [told["ended_ns"], end["end_ns"]]
        assert moments == sorted(moments)
        # 201 tokens at 1 ms each.
        assert told["prefilled_ns"] - told["prefill_asked_ns"] > 0.2 * S
        text = on.get("/metrics").body.decode()
        assert 'kvtax_proxy_offload_seconds_count{phase="prefill"} 1.0' in text


@pytest.mark.slow
def test_where_no_kv_arrives_the_next_request_does_not_wait_for_it(
    two: list[Standin], tmp_path: Path
) -> None:
    roles = named(two, "nixl", ("prefill", "decode"))
    with proxy(tmp_path, roles, "pd_sep", "--handover-timeout-s", "1") as on:
        two[0].set_faults("withhold_kv")
        for name in ("first", "second"):
            answer = post(on.url, ask(unlike(len(name))), X_Request_Id=name)
            assert answer.status == 200
        first, second = on.end("first"), on.end("second")
        assert first["offload"]["failure"] == "handover_slow"
        assert second["offload"]["failure"] == "resting"
        assert "no KV came from a to b" in second["fallback"]
        assert "prefill_asked_ns" not in second["offload"]
        assert (second["status"], second["instance"]) == ("ok", "b")
        on.idle()
        on.accounted(2)
