# SPDX-License-Identifier: Apache-2.0
"""Which config of a run plays which part in its report.

A run says so itself, in run.json. For a run from before it did, the configs' TOML files
are asked, where they are still there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from lab.config import read_toml
from lab.paths import CONFIGS
from lab.records.roles import Role, RoleName
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


class _Toml(msgspec.Struct):
    """As much of a connector's TOML as a report needs."""

    report: Role | None = None


def roles_of(run: RunRecord, names: Iterable[str]) -> Roles:
    """The roles of the configs `names` of `run`.

    Raises ConfigError for a run without roles, if a config's file cannot be read.
    """
    if run.configs is None:
        return Roles({name: _from_toml(name) for name in names})
    return Roles({name: run.configs.get(name, Role()) for name in names})


def _from_toml(name: str) -> Role:
    path = CONFIGS / "connectors" / f"{name}.toml"
    if not path.is_file():
        return Role()
    return read_toml(path, _Toml).report or Role()
