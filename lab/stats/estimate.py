# SPDX-License-Identifier: Apache-2.0
"""A value and how well it is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Every bootstrap starts from this seed: the same files give the same intervals.
SEED = 20_240_731
REPLICATES = 500


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap values, (replicates,)."""

    value: float
    draws: Floats

    @property
    def ci95(self) -> tuple[float, float]:
        """Percentile interval (Efron and Tibshirani 1993, 13.3)."""
        low, high = np.quantile(self.draws, (0.025, 0.975))
        return float(low), float(high)

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates."""
        # The two were drawn independently, so pairing them by index is as good as any.
        return Estimate(self.value - other.value, self.draws - other.draws)

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two independent estimates, `other` away from zero."""
        return Estimate(self.value / other.value, self.draws / other.draws)
