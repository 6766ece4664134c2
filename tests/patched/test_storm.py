# SPDX-License-Identifier: Apache-2.0
"""Direct read never accepts a wrong byte; without either safeguard it does."""

from __future__ import annotations

import sys

import pytest
from storm_lab import LEDGERS, Storm

PATCHES = ["block_pool_delta_listener"]
ONLY = "0.18.1"
# One step at a time, and two in flight as under async scheduling.
DEPTHS = [1, 2]
CONTROLS = ["without exclusion", "without validation"]
DURATION_S = 20.0
ENOUGH_WRONG = 20


@pytest.fixture(autouse=True)
def threads_take_turns_all_the_time():
    """Also within a lookup."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def storm(ledger: str, depth: int) -> dict[str, int]:
    return Storm(LEDGERS[ledger], depth, seed=depth).run(DURATION_S, ENOUGH_WRONG)


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_wrong_byte_is_accepted(depth):
    counts = storm("as it is", depth)
    assert counts["wrong"] == 0, counts
    # What makes it hard was there.
    assert counts["accepted"] > 1_000, counts
    assert counts["blocks_evicted"] > 100, counts
    assert counts["stopped_in_flight"] > 100, counts
    assert counts["resets"] > 0, counts


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ledger", CONTROLS)
def test_without_a_safeguard_wrong_bytes_are_accepted(ledger, depth):
    counts = storm(ledger, depth)
    assert counts["wrong"] >= ENOUGH_WRONG, counts
