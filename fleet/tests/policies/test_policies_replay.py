# SPDX-License-Identifier: Apache-2.0
"""Recorded snapshots, decided again offline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvtax_fleet.policies import POLICIES, PolicyError, parameters_of
from kvtax_fleet.policies.decision import RequestInfo
from kvtax_fleet.policies.replay import decide_again
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.records.decisions import (
    Candidate,
    DecisionEnd,
    DecisionsHeader,
    Snapshot,
)


def snapshot(number: int) -> Snapshot:
    """Different each time: one instance is loaded, another has the prefix."""
    roles = ["prefill", "decode", "both", "both"]
    candidates = [
        Candidate(
            f"i{n}",
            roles[n],
            requests=(number + n) % 3,
            ongoing_tokens=(number * 7919 + n * 104_729) % 90_000,
            pending_prefill_tokens=(number * 31 + n * 17) % 5_000,
            cached_tokens=(number * 613 + n * 1_009) % 30_000,
        )
        for n in range(4)
    ]
    return Snapshot(candidates, f"i{number % 4}", number, number % 4)


@pytest.fixture
def record(tmp_path: Path):
    """A decisions file as the proxy writes it."""

    def written(policy: str, given: dict[str, float]) -> Path:
        path = tmp_path / "decisions.jsonl"
        parameters = parameters_of(policy, given)
        header = DecisionsHeader(
            policy=policy, parameters=msgspec.structs.asdict(parameters)
        )
        with DecisionLog(path, header) as log:
            for number in range(200):
                ask = RequestInfo("s", 500 + number * 211)
                decision = POLICIES[policy].decide(ask, snapshot(number), parameters)
                end = DecisionEnd(str(number), number, "s", status="ok")
                log.decided(
                    end,
                    decision,
                    attempt=0,
                    prompt_tokens=ask.prompt_tokens,
                    form="ids",
                    cache="mirror",
                    snapshot=snapshot(number),
                    decision_us=1.0,
                )
                log.ended(end)
        return path

    return written


@pytest.mark.parametrize("policy", POLICIES)
def test_the_recorded_policy_decides_identically(policy, record):
    given = {"alpha": 0.3} if "alpha" in dir(parameters_of(policy, {})) else {}
    path = record(policy, given)
    again = decide_again(path)
    assert (again.decisions, again.reproduced) == (200, True)


def test_a_policy_that_the_recorded_instances_cannot_serve_is_refused(record):
    path = record("round_robin", {})
    path.write_text(path.read_text().replace('"decode"', '"both"'))
    with pytest.raises(PolicyError, match=r"pd_sep cannot decide .* role decode"):
        decide_again(path, "pd_sep")


def test_another_policy_is_compared_with_the_recorded_decisions(record):
    path = record("round_robin", {})
    compared = decide_again(path, "load_only")
    parameters = parameters_of("load_only", {})
    differ = 0
    for line in path.read_bytes().splitlines():
        entry = msgspec.json.decode(line)
        if entry.get("type") == "decision":
            number = entry["number"]
            ask = RequestInfo("s", entry["prompt_tokens"])
            again = POLICIES["load_only"].decide(ask, snapshot(number), parameters)
            differ += again.instance != entry["instance"]
    assert 0 < differ < 200
    assert compared.differ["instance"] == differ
    assert compared.reproduced


def test_a_decision_that_does_not_follow_is_found(record):
    path = record("load_only", {})
    text = path.read_text().replace('"reason":"least load"', '"reason":"a hunch"', 1)
    path.write_text(text)
    assert not decide_again(path).reproduced
