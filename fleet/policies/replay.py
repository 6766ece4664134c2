# SPDX-License-Identifier: Apache-2.0
"""Decide recorded snapshots again: `python -m fleet.policies.replay decisions.jsonl`.

With `--policy` (and `--parameters`) another policy decides the very same snapshots, and
the output says how often it differs. This compares decisions, not outcomes: the later
snapshots follow from the recorded decisions. Without `--policy` the recorded policy
decides again, which must give the same decisions.

Exit status: 0, 1 if the recorded policy decides otherwise than recorded, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from lab.records import RecordsError
from lab.records.decisions import DecisionEnd, DecisionRecord, DecisionsHeader
from lab.records.lines import read_lines

from . import POLICIES, Ask, Decision, PolicyError, named_values, parameters_of


def read_decisions(path: Path) -> tuple[DecisionsHeader, list[DecisionRecord]]:
    """The header, and the decisions in order. Raises RecordsError.

    A torn last line, which a killed proxy leaves, is passed over.
    """
    lines = read_lines(path, DecisionsHeader, DecisionRecord | DecisionEnd)
    if lines.header is None:
        raise RecordsError(f"{path}:1: no header line")
    return lines.header, [
        line for line in lines.records if isinstance(line, DecisionRecord)
    ]


def _decision(recorded: DecisionRecord) -> Decision:
    return Decision(
        recorded.instance,
        recorded.prefill_instance,
        recorded.read_from,
        recorded.scores,
        recorded.reason,
        recorded.kind,
        recorded.moves_from,
        recorded.prefill_timeout_s,
    )


def differences(
    recorded: list[DecisionRecord], policy: str, parameters: msgspec.Struct
) -> tuple[int, dict[str, int]]:
    """How many decisions there are, and how many differ in each field."""
    decide = POLICIES[policy]
    differ = dict.fromkeys(Decision.__struct_fields__, 0)
    for one in recorded:
        before = _decision(one)
        again = decide(Ask(one.session, one.prompt_tokens), one.snapshot, parameters)
        for field in differ:
            differ[field] += getattr(again, field) != getattr(before, field)
    return len(recorded), differ


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.policies.replay", description=__doc__.splitlines()[0]
    )
    parser.add_argument("decisions", type=Path)
    parser.add_argument("--policy", choices=list(POLICIES))
    parser.add_argument("--parameters", nargs="*", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    try:
        header, recorded = read_decisions(options.decisions)
        policy = options.policy or header.policy
        given = named_values(options.parameters)
        same = policy == header.policy and not given
        parameters = parameters_of(policy, header.parameters if same else given)
        total, differ = differences(recorded, policy, parameters)
    except (PolicyError, RecordsError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{total} decisions by {header.policy}, again by {policy} {parameters}")
    for field in ("instance", "prefill", "read_from"):
        share = differ[field] / total if total else 0.0
        print(f"  {field} differs in {differ[field]} ({share:.1%})")
    if same and any(differ.values()):
        print(f"not reproduced, fields that differ: {differ}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
