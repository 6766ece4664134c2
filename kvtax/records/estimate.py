# SPDX-License-Identifier: Apache-2.0
"""A value and its 95 % interval, as files and tables hold them."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec


class HasInterval(Protocol):
    """An `Estimate`, or a `kvtax.stats.distribution.Distribution`."""

    @property
    def value(self) -> float: ...

    @property
    def ci95(self) -> tuple[float, float] | None: ...


class Estimate(msgspec.Struct, frozen=True):
    """A value and its 95 % interval, both in the unit of the field that holds them.

    As JSON it is `{"value": ..., "ci95": [low, high]}`. A format such as `.1f` or
    `+,.2f` applies to each number: `f"{estimate:.1f}"` is `value [low, high]`.
    """

    value: float
    """The value."""
    ci95: tuple[float, float] | None = None
    """Low and high end; null where nothing shows how well the value is known."""

    @classmethod
    def of(cls, measured: HasInterval, digits: int | None = None) -> Estimate:
        """Copy value and interval; round them, and drop an interval without ends."""
        ends = measured.ci95
        if ends is None or digits is None:
            return cls(measured.value, ends)
        low, high = (round(end, digits) for end in ends)
        known = math.isfinite(low) and math.isfinite(high)
        return cls(round(measured.value, digits), (low, high) if known else None)

    @property
    def low(self) -> float:
        """The lower end of the interval; NaN if it is not known."""
        return self.ci95[0] if self.ci95 else math.nan

    @property
    def high(self) -> float:
        """The upper end of the interval; NaN if it is not known."""
        return self.ci95[1] if self.ci95 else math.nan

    def __format__(self, spec: str) -> str:
        if self.ci95 is None:
            return f"{self.value:{spec}} [?]"
        low, high = self.ci95
        return f"{self.value:{spec}} [{low:{spec}}, {high:{spec}}]"
