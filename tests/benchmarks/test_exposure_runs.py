# SPDX-License-Identifier: Apache-2.0
"""An engine on the null device serves a benchmark's load, and its steps are found."""

from __future__ import annotations

import pytest

from benchmarks.exposure import DELAYING, FORWARD_US, RECORDING, Cell, measure

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
