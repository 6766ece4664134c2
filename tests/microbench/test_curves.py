# SPDX-License-Identifier: Apache-2.0
"""The curves show growth with |cache| alone: no repeat, no batch, no other time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from lab.records.phases import Phase
from microbench.summary.curves import BINS, binned_curves

STEPS, BLOCKS = 3_000, 15_000


def growth(repeat: int, slope: float) -> pl.DataFrame:
    """A growth phase whose batch size, 7 us each, rises with |cache|."""
    blocks = np.linspace(0, BLOCKS, STEPS)
    jitter = np.arange(STEPS) % 3
    batch = (2 + blocks / 5_000 + jitter).astype(int)
    us = 100 + 7.0 * batch + 30.0 * repeat
    return pl.DataFrame(
        {
            "repeat": repeat,
            "phase": Phase.GROWTH,
            "batch": batch,
            "cache_blocks": blocks.astype(int),
            "schedule_us": us + slope * blocks / 1_000,
            "build_meta_us": us,
        }
    )


@pytest.fixture
def measured():
    steps = pl.concat([growth(repeat, slope=20.0) for repeat in range(2)])
    return {"one": SimpleNamespace(steps=steps)}


def test_a_curve_rises_by_the_slope_of_its_own_time(measured):
    for time, slope in (("schedule_us", 20.0), ("build_meta_us", 0.0)):
        curve = binned_curves(measured, time)
        assert curve.height == BINS
        fit = np.polyfit(curve["cache_blocks"], curve["p50_us"], 1)
        assert fit[0] * 1_000 == pytest.approx(slope, abs=0.1)


def test_the_band_holds_neither_repeats_nor_batch_sizes(measured):
    curve = binned_curves(measured, "build_meta_us")
    assert (curve["p75_us"] - curve["p25_us"]).max() < 0.01


def test_a_time_that_no_config_measured_has_no_curve(measured):
    steps = measured["one"].steps.with_columns(build_meta_us=pl.lit(None, pl.Float64))
    assert binned_curves(
        {"one": SimpleNamespace(steps=steps)}, "build_meta_us"
    ).is_empty()
