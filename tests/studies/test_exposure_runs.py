# SPDX-License-Identifier: Apache-2.0
"""An engine on the null device serves a benchmark's load, and its steps are found."""

from __future__ import annotations

import pytest

from kvtax.engine.null_engine import NOOP
from studies.exposure.__main__ import DELAYING, RECORDING
from studies.exposure.bench import FORWARD_US, Cell, measure

pytestmark = pytest.mark.long


def test_each_token_waits_for_its_forward_and_a_known_delay_is_found():
    def cells(bench):
        engine = bench.start("delaying", "sync", DELAYING, RECORDING)
        for delay_us in (0.0, 2_000.0):
            yield Cell("sync", 1.0, "build_connector_meta", delay_us), engine

    measured, _ = measure(cells, FORWARD_US, rounds=2, requests=8)
    assert all(one.gap_us["p50"] > FORWARD_US for one in measured)
    exposed_us = {
        one.cell.delay_us: one.exposed_us["scheduler.build_connector_meta_us"]
        for one in measured
    }
    # The delay is CPU time: on a busy machine it takes longer.
    assert exposed_us[2_000.0] - exposed_us[0.0] > 1_900


def test_a_busy_thread_of_the_second_rank_makes_the_gaps_longer():
    def cells(bench):
        engine = bench.start("noop", "async", NOOP, RECORDING, ranks=2)
        for busy in (0.0, 1.0):
            yield Cell("async", 1.0, "noop", busy=busy, ranks=2), engine

    measured, _ = measure(cells, FORWARD_US, rounds=2, requests=8)
    gap_us = {
        busy: min(one.gap_us["p50"] for one in measured if one.cell.busy == busy)
        for busy in (0.0, 1.0)
    }
    # Each hand-over of the GIL takes 5 ms.
    assert gap_us[1.0] - gap_us[0.0] > 1_000
