# SPDX-License-Identifier: Apache-2.0
"""Decide recorded snapshots again: `kvtax fleet decide decisions.jsonl`.

This compares decisions, not outcomes: the later snapshots follow from the recorded
decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvtax.records.files import read_lines

from kvtax_fleet.policies import POLICIES, PolicyError, parameters_of
from kvtax_fleet.policies.decision import Decision, NoInstance, Parameters, RequestInfo
from kvtax_fleet.records.decisions import DecisionEnd, DecisionRecord, DecisionsHeader


def read_decisions(path: Path) -> tuple[DecisionsHeader, list[DecisionRecord]]:
    """Read the header, and the decisions in order. Raises RecordsError.

    A torn last line, which a killed proxy leaves, is left out.
    """
    lines = read_lines(path, DecisionsHeader, DecisionRecord | DecisionEnd)
    return lines.header, [
        line for line in lines.records if isinstance(line, DecisionRecord)
    ]


def _decision(recorded: DecisionRecord) -> Decision:
    return Decision(
        recorded.instance,
        recorded.prefill_instance,
        recorded.scores,
        recorded.reason,
        recorded.kind,
        recorded.prefill_timeout_s,
    )


def differences(
    recorded: list[DecisionRecord], policy: str, parameters: Parameters
) -> tuple[int, dict[str, int]]:
    """Count the decisions, and those that differ in each field."""
    decide = POLICIES[policy].decide
    differ = dict.fromkeys(Decision.__struct_fields__, 0)
    for record in recorded:
        before = _decision(record)
        request = RequestInfo(record.session, record.prompt_tokens)
        again = decide(request, record.snapshot, parameters)
        for field in differ:
            differ[field] += getattr(again, field) != getattr(before, field)
    return len(recorded), differ


class Comparison(NamedTuple):
    """Decisions decided again; `same`: by the recorded policy and parameters."""

    recorded_policy: str
    policy: str
    parameters: Parameters
    decisions: int
    differ: dict[str, int]
    same: bool

    @property
    def reproduced(self) -> bool:
        """Return whether the recorded policy decides as recorded."""
        return not (self.same and any(self.differ.values()))

    def text(self) -> str:
        """Return lines for a terminal."""
        by = f"{self.policy} {self.parameters}"
        lines = [f"{self.decisions} decisions by {self.recorded_policy}, again by {by}"]
        for field in ("instance", "prefill"):
            share = self.differ[field] / self.decisions if self.decisions else 0.0
            lines.append(f"  {field} differs in {self.differ[field]} ({share:.1%})")
        if not self.reproduced:
            lines.append(f"not reproduced, fields that differ: {self.differ}")
        return "\n".join(lines)


def decide_again(
    path: Path, policy: str | None = None, given: Mapping[str, str] = {}
) -> Comparison:
    """Decide the snapshots in `path` by another policy, or by the recorded one.

    Raises PolicyError and RecordsError.
    """
    header, recorded = read_decisions(path)
    policy = policy or header.policy
    same = policy == header.policy and not given
    parameters = parameters_of(policy, header.parameters if same else given)
    try:
        total, differ = differences(recorded, policy, parameters)
    except NoInstance as error:
        raise PolicyError(
            f"{path}: policy {policy} cannot decide for these instances: {error}"
        ) from None
    return Comparison(header.policy, policy, parameters, total, differ, same)
