# SPDX-License-Identifier: Apache-2.0
"""Two arms are compared only if nothing differs but what they are about."""

from __future__ import annotations

from pathlib import Path

import pytest
from analyze_runs import Truth, write_run

from fleet.analyze.records import read_run
from fleet.analyze.refusals import found_warm, refusals


def pair(folder: Path, **worse) -> list:
    """Two arms; `worse` is what is wrong with the second one."""
    base = {"policy": "linear", "concurrency": 2, "baseline": "a"}
    arms = [Truth("a", **base), Truth("b", **(base | {"policy": "lmetric"} | worse))]
    return read_run(write_run(folder, arms))


def test_arms_that_differ_in_their_policy_alone_are_compared(tmp_path):
    assert refusals(pair(tmp_path), "b", "a") == []


@pytest.mark.parametrize(
    ("worse", "what"),
    [
        ({"fresh": False}, "cold caches"),
        ({"status": "failed"}, "the run failed"),
        ({"saturated": "cores"}, "did not keep up"),
        ({"valid": False}, "sent late"),
        ({"fails": 1}, "did not end ok differ"),
        ({"sessions": 39}, "requests differ"),
        ({"repeats": 1}, "repeats are not the same"),
        ({"concurrency": 8}, "concurrency differs"),
    ],
)
def test_a_comparison_is_refused_with_the_reason(worse, what, tmp_path):
    runs = pair(tmp_path, **worse)
    for arm, baseline in (("a", "b"), ("b", "a")):
        assert any(what in reason for reason in refusals(runs, arm, baseline))


def test_an_arm_that_did_not_run_is_not_compared(tmp_path):
    assert refusals(pair(tmp_path), "c", "a") == ["there is no run of c"]


def test_a_warm_instance_shows_in_the_records_alone(tmp_path):
    """Counters can be reset; what a request found cached was there."""
    requests = pair(tmp_path)[0].requests
    assert found_warm(requests) is None
    first = min(requests, key=lambda one: one.sent_ns)
    first.cached_tokens = 512
    assert f"{first.instance} found 512 tokens" in found_warm(requests)
    first.prefill_instance = "another"
    assert found_warm(requests) is None
