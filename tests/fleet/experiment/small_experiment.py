# SPDX-License-Identifier: Apache-2.0
"""An experiment of three arms on stand-ins, to change one thing of."""

from __future__ import annotations

from fleet.experiment.config import (
    Arm,
    Experiment,
    Workload,
)


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
