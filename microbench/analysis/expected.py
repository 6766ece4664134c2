# SPDX-License-Identifier: Apache-2.0
"""Configs whose true cost is known: did each get the verdict that it must get?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.records.per_config import PerConfig, Verdict
from microbench.analysis.roles import Roles

Kind = Literal["right", "false flat", "false grows", "wrong", "undecided"]


@dataclass(frozen=True)
class Outcome:
    """What a config was called, and what it had to be called."""

    config: str
    expected: Verdict
    found: Verdict

    @property
    def kind(self) -> Kind:
        """`undecided` is no answer, a failed config's too; `wrong` is another error."""
        if self.found == self.expected:
            return "right"
        if self.found in ("inconclusive", "failed"):
            return "undecided"
        if self.found in ("flat", "grows"):
            return f"false {self.found}"
        return "wrong"

    def __str__(self) -> str:
        return f"{self.config}: expected {self.expected}, found {self.found}"


def outcomes(document: PerConfig, roles: Roles) -> list[Outcome]:
    """One for each config whose role names a verdict, in the run's order."""
    return [
        Outcome(name, expected, entry.verdict)
        for name, entry in document.configs.items()
        if (expected := roles.of[name].expected) is not None
    ]
