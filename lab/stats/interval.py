# SPDX-License-Identifier: Apache-2.0
"""A value with its 95 % interval: what is left of an estimate in a file or a table."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from lab.stats.estimate import Estimate


class Interval(msgspec.Struct, frozen=True):
    """A value and its 95 % interval, both in the unit of the field that holds them.

    As JSON it is `{"value": ..., "ci95": [low, high]}`. A format such as `.1f` or
    `+,.2f` applies to each number: `f"{interval:.1f}"` is `value [low, high]`.
    """

    value: float
    ci95: tuple[float, float]

    @classmethod
    def of(cls, estimate: Estimate) -> Interval:
        return cls(estimate.value, estimate.ci95)

    def __format__(self, spec: str) -> str:
        low, high = self.ci95
        return f"{self.value:{spec}} [{low:{spec}}, {high:{spec}}]"


def stated(estimate: Estimate | None, digits: int) -> dict[str, Any] | None:
    """{value, ci95}, rounded, as it stands in a document; None without an estimate.

    `ci95` is None where the draws are not finite: a value without an interval.
    """
    if estimate is None:
        return None
    edges = estimate.ci95
    known = bool(np.isfinite(edges).all())
    return {
        "value": round(estimate.value, digits),
        "ci95": [round(edge, digits) for edge in edges] if known else None,
    }
