# SPDX-License-Identifier: Apache-2.0
"""Small experiments on stand-ins, for tests that change one thing in them."""

from __future__ import annotations

from kvtax_fleet.experiment.config import Arm, Experiment, Workload
from kvtax_fleet.paths import CONFIGS

SMOKE = CONFIGS / "experiments" / "smoke.toml"
# Tests share their machine, so that whether it kept up is not for them to say.
OF_THE_MACHINE = ("the machine did not keep up", "requests were sent late")


def smoke_of(arms: int) -> str:
    """The smoke experiment with its first so many arms; it has no A/A pair."""
    return "[arms.".join(SMOKE.read_text().split("[arms.")[: 1 + arms])


def experiment(**changes) -> Experiment:
    arms = {"a": Arm("linear"), "b": Arm("round_robin"), "again": Arm("linear")}
    fields = {
        "summary": "x",
        "workload": Workload("t"),
        "arms": arms,
        "baseline": "a",
        "standin": [],
    }
    return Experiment(**(fields | changes))
