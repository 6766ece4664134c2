# SPDX-License-Identifier: Apache-2.0
"""What a config is to a report: the `[report]` table of configs/connectors/<name>.toml.

The sweep copies the tables into run.json, so that a report needs only the files of its
run. A config without the table is measured and reported like any other.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lab.config import read_toml
from lab.paths import CONFIGS
from lab.records.per_config import Verdict

RoleName = Literal["baseline", "twin", "floor", "hypothesis"]


class AimOfConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that one number of a config is meant to be."""

    quantity: Literal["times_floor", "slope_us_per_1k_blocks"]
    """The p50 of `metric` over that of the floor, or what it grows by."""
    metric: Literal["schedule", "overhead", "step"]
    """Which of the times that have a verdict."""
    at_most: float
    """The bound, which is within the aim."""
    whose: str = "ours"
    """Who set the aim."""


class ReferenceFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the reference study measured of the same thing; null: it does not say."""

    schedule_slope_us_per_1k_blocks: float
    """Growth of the time in `schedule()`."""
    schedule_p50_us: float
    """Time in `schedule()`."""
    build_meta_p50_us: float | None = None
    """Time in `build_connector_meta`."""
    get_finished_us: tuple[float, float, float] | None = None
    """p50, p90 and p99 of the time in `get_finished`."""


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `[report]` table of a config."""

    role: RoleName | None = None
    """`baseline`: the others are compared with it. `twin`: the baseline once more, to
    show the noise. `floor`: a connector that does nothing; ratios to it leave out the
    framework's own cost. `hypothesis`: its cost is claimed to be linear in |cache|."""
    label: str | None = None
    """What prose calls the config; null: by its name."""
    before_after: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Place in the figure and the table before and after the fixes, lowest first;
    null: not in them."""
    layer: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Place in the fleet's report of what each connector adds to the one before,
    lowest first; null: not in it."""
    aims: list[AimOfConfig] = []
    """What the config is meant to cost."""
    expected: Verdict | None = None
    """The verdict that the config must get, where its true cost is known; null: it is
    not. A sweep in which a config gets another one ends with exit status 1."""
    reference: ReferenceFigures | None = None
    """Shown beside what a run measured."""


class _ConfigFile(msgspec.Struct):
    report: Role = Role()


def role_in_toml(name: str) -> Role:
    """What configs/connectors/<name>.toml says, for runs that did not note it.

    A config that is no longer there has no role. Raises ConfigError.
    """
    path = CONFIGS / "connectors" / f"{name}.toml"
    return read_toml(path, _ConfigFile).report if path.is_file() else Role()
