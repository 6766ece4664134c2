# SPDX-License-Identifier: Apache-2.0
"""A small experiment on stand-ins, for tests that change one thing in it."""

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
