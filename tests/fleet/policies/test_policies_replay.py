# SPDX-License-Identifier: Apache-2.0
"""Recorded snapshots, decided again offline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fleet.policies import POLICIES, Ask, Candidate, Snapshot, parameters_of
from fleet.policies.replay import main
from fleet.proxy.decision_log import DecisionLog
from lab.records.decisions import DecisionEnd, DecisionsHeader


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
                ask = Ask("s", 500 + number * 211)
                decision = POLICIES[policy](ask, snapshot(number), parameters)
                end = DecisionEnd(str(number), number, "s", status="ok")
                log.decided(
                    end, 0, ask, snapshot(number), decision, "ids", "mirror", 1.0
                )
                log.ended(end)
        return path

    return written


@pytest.mark.parametrize("policy", POLICIES)
def test_the_recorded_policy_decides_identically(policy, record, capsys) -> None:
    given = {"alpha": 0.3} if "alpha" in dir(parameters_of(policy, {})) else {}
    path = record(policy, given)
    assert main([str(path)]) == 0
    assert "200 decisions" in capsys.readouterr().out


def test_another_policy_is_compared_with_what_was_decided(record, capsys) -> None:
    path = record("round_robin", {})
    assert main([str(path), "--policy", "load_only"]) == 0
    parameters = parameters_of("load_only", {})
    differ = 0
    for line in path.read_bytes().splitlines():
        one = msgspec.json.decode(line)
        if one.get("type") == "decision":
            number = one["number"]
            ask = Ask("s", one["prompt_tokens"])
            again = POLICIES["load_only"](ask, snapshot(number), parameters)
            differ += again.instance != one["instance"]
    assert 0 < differ < 200
    assert f"instance differs in {differ} " in capsys.readouterr().out


def test_a_decision_that_does_not_follow_is_found(record, capsys) -> None:
    path = record("load_only", {})
    text = path.read_text().replace('"reason":"least load"', '"reason":"a hunch"', 1)
    path.write_text(text)
    assert main([str(path)]) == 1
    assert "not reproduced" in capsys.readouterr().err


def test_a_torn_last_line_is_passed_over(record, capsys) -> None:
    path = record("linear", {})
    with path.open("ab") as file:
        file.write(b'{"type":"decision","id":"torn')
    assert main([str(path)]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "missing"),
        ("", "no header"),
        ('{"schema":"kvtax.replay/1","policy":"x","parameters":{}}\n', "schema is"),
        (
            '{"schema":"kvtax.decisions/1","policy":"linear","parameters":{}}\n'
            '{"type":"decision","id":"1"}\n',
            ":2:",
        ),
    ],
)
def test_what_is_no_decisions_file_is_refused(text, said, tmp_path, capsys) -> None:
    path = tmp_path / "decisions.jsonl"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err
