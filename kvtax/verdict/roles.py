# SPDX-License-Identifier: Apache-2.0
"""Roles of the configs in a run's report, as run.json has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvtax.records.per_config import PerConfig
from kvtax.records.run import Role, RoleName, RunRecord, Verdict
from kvtax.report import places


@dataclass(frozen=True)
class Roles:
    """The roles of a run's configs, by name and in the run's order."""

    of: dict[str, Role]

    def named(self, role: RoleName) -> list[str]:
        """Return the configs that have `role`."""
        return [name for name, its in self.of.items() if its.role == role]

    def _first(self, role: RoleName) -> str | None:
        return next(iter(self.named(role)), None)

    @property
    def baseline(self) -> str | None:
        """Config that all others are compared with; None if the run has none."""
        return self._first("baseline")

    @property
    def twin(self) -> str | None:
        """Second config that is identical to the baseline."""
        return self._first("twin")

    @property
    def floor(self) -> str | None:
        """Config of the no-op connector."""
        return self._first("floor")

    @property
    def places(self) -> dict[str, int]:
        """Place of each config's colour, the same in every picture."""
        return places({name: role.colour for name, role in self.of.items()})


def roles_of(run: RunRecord, names: Iterable[str]) -> Roles:
    """Return the roles of the configs `names` of `run`."""
    return Roles({name: run.configs.get(name, Role()) for name in names})


Kind = Literal["right", "false flat", "false grows", "wrong", "undecided"]


@dataclass(frozen=True)
class ExpectedVerdict:
    """Expected and actual verdict of a config."""

    config: str
    expected: Verdict
    verdict: Verdict

    @property
    def kind(self) -> Kind:
        """`undecided` is no answer, a failed config's too; `wrong` is another error."""
        if self.verdict == self.expected:
            return "right"
        if self.verdict in ("inconclusive", "failed"):
            return "undecided"
        if self.verdict == "flat":
            return "false flat"
        return "false grows" if self.verdict == "grows" else "wrong"

    def __str__(self) -> str:
        return f"{self.config}: expected {self.expected}, is {self.verdict}"


def outcomes(document: PerConfig, roles: Roles) -> list[ExpectedVerdict]:
    """Return the verdicts of configs whose role names one, in the run's order."""
    return [
        ExpectedVerdict(name, expected, entry.verdict)
        for name, entry in document.configs.items()
        if (expected := roles.of[name].expected) is not None
    ]
