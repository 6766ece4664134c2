# SPDX-License-Identifier: Apache-2.0
"""Noise that configs of one run share, estimated from few values of each."""

import numpy as np
import pytest
from scipy import special

from kvtax.stats.distribution import t_quantile
from kvtax.stats.noise import FEWEST_CONFIGS, Noise, _digamma, _trigamma, shared_noise


def squares(rng, configs: int, df: int, agree_in: float) -> list[tuple[float, int]]:
    """Draw sums of squares of configs whose variances agree in so many values."""
    truths = agree_in / rng.chisquare(agree_in, configs)
    return [(truth * rng.chisquare(df), df) for truth in truths]


@pytest.mark.parametrize("x", [0.05, 0.5, 3.0, 400.0])
def test_digamma_and_trigamma_are_those_of_scipy(x):
    assert _digamma(np.array(x)) == pytest.approx(special.digamma(x), rel=1e-5)
    assert _trigamma(np.array(x)) == pytest.approx(special.polygamma(1, x), rel=1e-5)


@pytest.mark.parametrize("agree_in", [4.0, 10.0, 40.0])
def test_configs_weigh_as_many_values_as_they_agree_in(agree_in):
    rng = np.random.default_rng(1)
    noise = shared_noise(squares(rng, 4_000, 6, agree_in))
    assert noise.df == pytest.approx(agree_in, rel=0.25)
    assert noise.variance == pytest.approx(1.0, rel=0.1)


def test_intervals_of_one_value_each_hold_where_configs_are_taken_together():
    """Twelve configs, each with a mean of one error that is known by one value."""
    rng, right, of = np.random.default_rng(2), 0, 0
    for _ in range(300):
        truths = 8 / rng.chisquare(8, 12)
        left = [(truth * rng.chisquare(1), 1) for truth in truths]
        noise = shared_noise(left) or Noise(0.0, 0)
        for truth, own in zip(truths, left, strict=True):
            variance, df = noise.with_own(*own)
            reach = float(t_quantile(0.975, df)) * np.sqrt(variance)
            right += abs(rng.normal(0, np.sqrt(truth))) < reach
            of += 1
    assert 0.93 <= right / of <= 0.985


def test_few_configs_and_those_that_do_not_vary_share_no_noise():
    assert shared_noise([(1.0, 4)] * (FEWEST_CONFIGS - 1)) is None
    assert shared_noise([(0.0, 4)] * 20 + [(1.0, 4)]) is None
    # Sizes apart by powers of ten agree in nothing.
    assert shared_noise([(10.0**n, 40) for n in range(0, 40, 4)]) is None
