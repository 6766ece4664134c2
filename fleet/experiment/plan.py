# SPDX-License-Identifier: Apache-2.0
"""The order of the runs: A B C, then C B A, so that a drift hits all arms alike."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.experiment.config import Arm, Experiment


@dataclass(frozen=True)
class Run:
    """One arm at one concurrency in one repeat: a lifetime of the whole fleet.

    `concurrency` is in requests per instance. `baseline` and `same_as` are labels of
    other runs at this concurrency: what this is compared with, and the arm that is the
    very same (an A/A pair): the baseline, else the first one in the file.
    """

    label: str
    arm: Arm
    concurrency: int
    repeat: int
    baseline: str
    same_as: str | None

    @property
    def folder(self) -> str:
        return f"{self.label}/r{self.repeat}"


def plan(experiment: Experiment) -> list[Run]:
    """All runs in the order in which they are made."""
    forwards = [
        (concurrency, name)
        for concurrency in experiment.concurrency
        for name in experiment.arms
    ]
    return [
        Run(
            label(name, concurrency),
            experiment.arms[name],
            concurrency,
            repeat,
            label(experiment.baseline, concurrency),
            _same_as(experiment, name, concurrency),
        )
        for repeat in range(experiment.repeats)
        for concurrency, name in (forwards if repeat % 2 == 0 else forwards[::-1])
    ]


def label(arm: str, concurrency: int) -> str:
    return f"{arm}@{concurrency}"


def _same_as(experiment: Experiment, name: str, concurrency: int) -> str | None:
    for other in (experiment.baseline, *experiment.arms):
        if other == name:
            return None
        if experiment.arms[other] == experiment.arms[name]:
            return label(other, concurrency)
    return None
