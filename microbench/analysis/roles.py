# SPDX-License-Identifier: Apache-2.0
"""Which config of a run plays which part in its report.

A run says so itself, in run.json. For a run from before it did, the configs' TOML files
are asked, where they are still there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lab.records.roles import Role, RoleName, role_in_toml
from lab.records.run import RunRecord


@dataclass(frozen=True)
class Roles:
    """The roles of a run's configs, by name and in the run's order."""

    of: dict[str, Role]

    def named(self, role: RoleName) -> list[str]:
        """The configs that have `role`."""
        return [name for name, one in self.of.items() if one.role == role]

    def _first(self, role: RoleName) -> str | None:
        return next(iter(self.named(role)), None)

    @property
    def baseline(self) -> str | None:
        """The config that all others are compared with; None: the run has none."""
        return self._first("baseline")

    @property
    def twin(self) -> str | None:
        """The config that is the baseline once more."""
        return self._first("twin")

    @property
    def floor(self) -> str | None:
        """The connector that does nothing."""
        return self._first("floor")

    @property
    def before_after(self) -> list[str]:
        """The configs of the figure "before and after the fixes", in its order."""
        places = {n: r.before_after for n, r in self.of.items() if r.before_after}
        return sorted(places, key=places.__getitem__)

    def label(self, name: str) -> str:
        """What prose calls a config."""
        return self.of[name].label or f"`{name}`"


def roles_of(run: RunRecord, names: Iterable[str]) -> Roles:
    """The roles of the configs `names` of `run`.

    Raises ConfigError for a run without roles, if a config's file cannot be read.
    """
    if run.configs is None:
        return Roles({name: role_in_toml(name) for name in names})
    return Roles({name: run.configs.get(name, Role()) for name in names})
