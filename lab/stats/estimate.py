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
    """A value and what else it could be, each as likely: (draws,).

    Draws come from a bootstrap, or they are the quantiles of a distribution, shuffled.
    """

    value: float
    draws: Floats

    def interval(self, level: float) -> tuple[float, float]:
        """Percentile interval (Efron and Tibshirani 1993, 13.3); `level` as 0.95."""
        low, high = np.quantile(self.draws, ((1 - level) / 2, (1 + level) / 2))
        return float(low), float(high)

    @property
    def ci95(self) -> tuple[float, float]:
        return self.interval(0.95)

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates."""
        # The two were drawn independently, so pairing them by index is as good as any.
        return Estimate(self.value - other.value, self.draws - other.draws)

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two independent estimates, `other` away from zero."""
        return Estimate(self.value / other.value, self.draws / other.draws)
